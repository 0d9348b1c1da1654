"""ONNX: translation table, function bodies, export."""

from cheri_export.onnx_model.export import export_onnx, finish_onnx, node_counts, save_onnx
from cheri_export.onnx_model.functions import function_body
from cheri_export.onnx_model.translation import translation_table

__all__ = [
    "export_onnx",
    "finish_onnx",
    "function_body",
    "node_counts",
    "save_onnx",
    "translation_table",
]
