"""The report of an export: ``report.json`` for programs, ``report.html`` for people."""

from cheri_export.report.html import load_snippet, render_html
from cheri_export.report.record import ReportArrays, sanitise, schema, to_json, validate

__all__ = [
    "ReportArrays",
    "load_snippet",
    "render_html",
    "sanitise",
    "schema",
    "to_json",
    "validate",
]
