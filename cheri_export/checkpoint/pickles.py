"""A reader of pickles that builds plain data and nothing else.

`pickle.Unpickler` imports what it is told to import and calls what it is told to call; even a
restricted ``find_class`` leaves ``__setstate__``, ``__reduce__`` and ``__new__`` of whatever is
admitted. Here the opcodes come from `pickletools.genops`, which only decodes them, and a small
machine acts on those that torch.save writes. Globals become labels (`names.Name`), objects become
`names.Inert`, tensors become references that are checked against the archive before any memory
is taken.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
from collections.abc import Callable
from typing import Any

from cheri_export.checkpoint.messages import shape
from cheri_export.checkpoint.names import Inert, Name, Storage, StoredTensor, admit

MAX_OPCODES = 2_000_000
"""Longest program. Nine layers need about 3,000 opcodes; a fitted model's log adds thousands."""


Room = Callable[[str], "int | None"]


class Malformed(ValueError):
    """The bytes are no pickle, or one that no checkpoint writer produces."""


class _Mark:
    pass


_MARK = _Mark()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = {"PROTO", "FRAME"}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_SCALARS = {"i8": "<q", "i4": "<i", "u8": "<Q", "u4": "<I", "f8": "<d", "f4": "<f", "b1": "<?"}


class _Machine:
    """State of one run. See `load`."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.storages: dict[str, Storage] = {}
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise Malformed("stack underflow")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise Malformed("no mark")

    def step(self, op: str, arg: Any) -> None:
        """Act on one opcode."""
        push = self.stack.append
        if op in _LITERALS:
            push(arg)
        elif op in _CONSTANTS:
            push(_CONSTANTS[op])
        elif op == "MARK":
            push(_MARK)
        elif op in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[arg] = self.top()
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = self.top()
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            if arg not in self.memo:
                raise Malformed("memo entry missing")
            push(self.memo[arg])
        elif op == "GLOBAL":
            module, _, name = arg.partition(" ")
            push(admit(module, name))
        elif op == "STACK_GLOBAL":
            name, module = self.pop(), self.pop()
            if not (isinstance(name, str) and isinstance(module, str)):
                raise Malformed("global without a name")
            push(admit(module, name))
        elif op in ("BINPERSID", "PERSID"):
            push(self.persistent(self.pop() if op == "BINPERSID" else arg))
        elif op == "REDUCE":
            args, function = self.pop(), self.pop()
            push(self.reduce(function, args))
        elif op in ("NEWOBJ", "NEWOBJ_EX"):
            if op == "NEWOBJ_EX":
                self.pop()
            args, cls = self.pop(), self.pop()
            if not isinstance(cls, Name) or not isinstance(args, tuple):
                raise Malformed("object without a class")
            push(Inert(cls.full, args))
        elif op == "BUILD":
            self.build(self.pop())
        elif op == "POP":
            if not self.stack:
                raise Malformed("stack underflow")
            self.stack.pop()
        elif op == "POP_MARK":
            self.pop_mark()
        else:
            self.collect(op)

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise Malformed("stack underflow")
        return self.stack[-1]

    def collect(self, op: str) -> None:
        """Opcodes that make or fill tuples, lists and dictionaries."""
        push = self.stack.append
        if op in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            push({"T": (), "L": [], "D": {}}[op[6]])
        elif op == "EMPTY_SET":
            push(Inert("builtins.set", ([],)))
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            push(tuple(reversed([self.pop() for _ in range(int(op[5]))])))
        elif op == "TUPLE":
            push(tuple(self.pop_mark()))
        elif op == "LIST":
            push(self.pop_mark())
        elif op == "FROZENSET":
            push(Inert("builtins.frozenset", (self.pop_mark(),)))
        elif op == "DICT":
            items = self.pop_mark()
            push({})
            self.set_items(items)
        elif op in ("SETITEM", "SETITEMS"):
            if op == "SETITEM":
                value = self.pop()
                items = [self.pop(), value]
            else:
                items = self.pop_mark()
            self.set_items(items)
        elif op in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [self.pop()] if op == "APPEND" else self.pop_mark()
            target = self.top()
            if op == "ADDITEMS" and isinstance(target, Inert) and target.label == "builtins.set":
                target = target.args[0]
            if type(target) is list:
                target.extend(items)
            elif not isinstance(target, Inert):
                raise Malformed("append to something that is no list")
        else:
            # EXT codes, INST, OBJ, DUP, BYTEARRAY8, out-of-band buffers: torch.save has no use
            # for them, and the first three build objects.
            raise Malformed(f"opcode {op}")

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        if len(items) % 2:
            raise Malformed("key without a value")
        if isinstance(target, Inert):
            return
        if type(target) is not dict:
            raise Malformed("item set on something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples can take exponential time, so they are no keys.
            if key is not None and type(key) not in (str, int, float, bool):
                raise Malformed("dictionary key that is no text or number")
            target[key] = value

    def build(self, state: Any) -> None:
        """Note an object's state. There is no ``__setstate__`` and no attribute to overwrite."""
        target = self.top()
        if isinstance(target, Inert):
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
                state = state[0]
            target.state = state if isinstance(state, dict) else None
        elif type(target) is not dict:  # a state dict's ``_metadata`` is of no use here
            raise Malformed("state for something that has none")

    def persistent(self, pid: Any) -> Any:
        """Resolve ``('storage', class, key, location, numel)``; the location does not matter."""
        if not isinstance(pid, tuple) or not pid:
            raise Malformed("unknown persistent id")
        if pid[0] == "module" and len(pid) == 4 and isinstance(pid[1], Name):
            return pid[1]
        if pid[0] != "storage" or len(pid) not in (5, 6):
            raise Malformed("unknown persistent id")
        kind, key, numel = pid[1], pid[2], pid[4]
        if not isinstance(kind, Name) or not isinstance(key, (str, int)) or not _whole(numel):
            raise Malformed("unknown persistent id")
        if len(pid) == 6 and pid[5] is not None:
            raise Malformed("a storage that is a view of another, as torch 0.3 wrote")
        storage = Storage(str(key), kind.name, numel)
        space = self.room(storage.key)
        width = storage.dtype.itemsize if storage.dtype is not None else 1
        if space is None or numel * width > space:
            raise Malformed(
                f"tensor data {numel * width} bytes long were promised and "
                f"{'none' if space is None else space} are there"
            )
        if self.storages.setdefault(storage.key, storage) != storage:
            raise Malformed("one storage with two sizes or types")
        return storage

    def reduce(self, function: Any, args: Any) -> Any:
        """What a call would have given, as far as it is needed: tensors, dictionaries, bytes."""
        if not isinstance(function, Name) or not isinstance(args, tuple):
            raise Malformed("call of something that is no function")
        name = function.full
        if name in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
            return _tensor(args)
        parameter = name.startswith("torch._utils._rebuild_parameter") and args
        if parameter and isinstance(args[0], (StoredTensor, Inert)):
            return args[0]
        if name == "torch._tensor._rebuild_from_type_v2" and len(args) == 4:
            return self.reduce(args[0], args[2])
        if name in ("collections.OrderedDict", "builtins.dict") and not args:
            return {}
        if name == "torch.Size" and len(args) == 1 and isinstance(args[0], (tuple, list)):
            return tuple(args[0])
        if name == "_codecs.encode" and args[1:] == ("latin1",) and isinstance(args[0], str):
            return args[0].encode("latin1", "replace")
        if name.startswith("numpy.") and name.endswith(".scalar"):
            return _scalar(args)
        if name == "copyreg._reconstructor" and args and isinstance(args[0], Name):
            return Inert(args[0].full)
        return Inert(name, args)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _tensor(args: tuple[Any, ...]) -> StoredTensor:
    if len(args) < 4 or not isinstance(args[0], Storage):
        raise Malformed("tensor without a storage")
    storage, offset, size, stride = args[:4]
    fits = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride) <= 8
    if not fits or not all(_whole(v) for v in (offset, *size, *stride)):
        raise Malformed("tensor with an impossible shape")
    numel = math.prod(size)
    end = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if numel else 0
    # More elements than the storage has means overlapping strides: a small file would ask for
    # any amount of memory once the tensor is made contiguous.
    if end > storage.numel or numel > storage.numel:
        raise Malformed(f"tensor of shape {shape(size)} does not fit its {storage.numel} values")
    return StoredTensor(storage, offset, size, stride)


def _scalar(args: tuple[Any, ...]) -> Any:
    """A NumPy scalar as a Python number, where it is a plain one."""
    if len(args) == 2 and isinstance(args[0], Inert) and isinstance(args[1], bytes):
        code = args[0].args[0] if args[0].args else None
        form = _SCALARS.get(code) if isinstance(code, str) else None
        if form is not None and struct.calcsize(form) == len(args[1]):
            return struct.unpack(form, args[1])[0]
    return Inert("numpy.scalar")


def load(stream: io.BytesIO, room: Room) -> tuple[Any, dict[str, Storage]]:
    """Read one pickle from `stream`, which is left behind its end.

    Parameters
    ----------
    stream: io.BytesIO

    room: callable
        Bytes available for the storage of a given key; None if there is none.

    Returns
    -------
    tree: object
        Plain dictionaries, lists, tuples, numbers and text with `Name`, `Inert` and
        `StoredTensor` in them. The structure may share parts or contain itself: walk it with a
        depth limit.

    storages: dict of str to Storage
        Every storage that it mentions, by key.

    Raises
    ------
    CheckpointError
        If it names a global that is not admitted.
    Malformed
        If it cannot be read.
    """
    machine = _Machine(room)
    try:
        for count, (opcode, arg, _) in enumerate(pickletools.genops(stream)):
            if count >= MAX_OPCODES:
                raise Malformed(f"more than {MAX_OPCODES} instructions")
            if opcode.name == "STOP":
                return machine.pop(), machine.storages
            if opcode.name not in _IGNORED:
                machine.step(opcode.name, arg)
    except Malformed:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        MemoryError,
        struct.error,
    ) as error:
        raise Malformed(type(error).__name__) from None
    raise Malformed("no end")
