"""Java class files: read, changed in few places, and written again.

Names and numbers are those of chapter 4 of the Java Virtual Machine Specification. Code can be replaced or put before
other code; what has jumps of its own can't be written here, since it would need frames for the verifier.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from io import BytesIO

_UTF8, _CLASS, _STRING, _FIELD, _METHOD, _INTERFACE_METHOD, _NAME_AND_TYPE = 1, 7, 8, 9, 10, 11, 12
# Bytes after the tag.
_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
_TWO_PLACES = {5, 6}
# Attributes of code that say where in it something is, and are for debuggers only.
_FOR_DEBUGGERS = {"LineNumberTable", "LocalVariableTable", "LocalVariableTypeTable"}


@dataclass
class Caught:
    """An entry of an exception table: where it holds, where it goes, and the constant of the class that it catches."""

    start: int
    end: int
    handler: int
    type: int


@dataclass
class Code:
    """The body of a method.

    Attributes:
        stack: Deepest stack.
        local: Local variables.
        body: Instructions.
        caught: Which exceptions go where.
        attributes: Further attributes by name.
    """

    stack: int
    local: int
    body: bytes
    caught: list[Caught] = field(default_factory=list)
    attributes: dict[str, bytes] = field(default_factory=dict)

    def prepend(self, before: bytes) -> None:
        """Puts instructions without jumps before the others; a multiple of 4 bytes, so that switches stay aligned."""
        if len(before) % 4:
            raise ValueError(f"{len(before)} bytes are no multiple of 4")
        self.body = before + self.body
        for handler in self.caught:
            handler.start, handler.end, handler.handler = (
                at + len(before) for at in (handler.start, handler.end, handler.handler)
            )
        for name in _FOR_DEBUGGERS:
            self.attributes.pop(name, None)
        if "StackMapTable" in self.attributes:
            self.attributes["StackMapTable"] = _moved(self.attributes["StackMapTable"], len(before))

    def catch_all(self, start: int, end: int, handler: bytes, exception: int, last_frame: int) -> None:
        """Puts a handler behind the other instructions, to which every exception goes that a part of them throws.

        Args:
            start: Where that part starts.
            end: Where it ends.
            handler: Instructions without jumps, which begin with the exception on the stack and end with a throw. They
                may use the local variables of the last frame, all of which ``start`` has set.
            exception: The number of the class java/lang/Throwable.
            last_frame: Where the method's last frame is.
        """
        at = len(self.body)
        self.caught.append(Caught(start, end, at, 0))
        self.body += handler
        frames = self.attributes["StackMapTable"]
        (count,) = struct.unpack(">H", frames[:2])
        delta = at - last_frame - 1
        if not 0 <= delta < 64:
            raise ValueError(f"the last frame is not at {last_frame}")
        # same_locals_1_stack_item_frame, with an object.
        added = struct.pack(">BBH", 64 + delta, 7, exception)
        self.attributes["StackMapTable"] = struct.pack(">H", count + 1) + frames[2:] + added


def _moved(frames: bytes, by: int) -> bytes:
    """Moves the first frame; each of the others is placed by its distance from the one before."""
    if len(frames) == 2:
        # Their number, which is 0.
        return frames
    count, tag = struct.unpack(">HB", frames[:3])
    same, one = tag < 64, 64 <= tag < 128
    if not same and not one:
        (delta,) = struct.unpack(">H", frames[3:5])
        return frames[:3] + struct.pack(">H", delta + by) + frames[5:]
    delta = tag % 64 + by
    # same_frame_extended, same_locals_1_stack_item_frame_extended
    return struct.pack(">HBH", count, 251 if same else 247, delta) + frames[3:]


class _Reader(BytesIO):
    """Reads what class files are made of."""

    def take(self, form: str) -> int:
        """Returns the next number, of a form of `struct`."""
        (value,) = struct.unpack(form, self.read(struct.calcsize(form)))
        return int(value)

    def attributes(self) -> list[tuple[int, bytes]]:
        """Returns attributes with the number of their name."""
        return [(self.take(">H"), self.read(self.take(">I"))) for _ in range(self.take(">H"))]

    def members(self) -> list[tuple[bytes, list[tuple[int, bytes]]]]:
        """Returns fields or methods: access, name and type as they are, and attributes."""
        return [(self.read(6), self.attributes()) for _ in range(self.take(">H"))]


class ClassFile:
    """A class.

    Args:
        data: The class file.

    Raises:
        ValueError: It is none.
    """

    def __init__(self, data: bytes) -> None:
        source = _Reader(data)
        if source.take(">I") != 0xCAFEBABE:
            raise ValueError("this is no class file")
        self._version = source.read(4)
        # Constants are numbered from 1; long ones take two numbers.
        self._constants: list[tuple[int, bytes]] = [(0, b"")]
        count = source.take(">H")
        while len(self._constants) < count:
            tag = source.take(">B")
            self._constants.append((tag, source.read(source.take(">H") if tag == _UTF8 else _SIZES[tag])))
            if tag in _TWO_PLACES:
                self._constants.append((0, b""))
        self._head = source.read(6)
        self._interfaces = source.read(2 * source.take(">H"))
        self._fields = source.members()
        self._methods = source.members()
        self._attributes = source.attributes()

    def to_bytes(self) -> bytes:
        """Returns the class file."""
        out = [b"\xca\xfe\xba\xbe", self._version, struct.pack(">H", len(self._constants))]
        for tag, value in self._constants:
            if tag:
                out += [struct.pack(">B", tag), struct.pack(">H", len(value)) if tag == _UTF8 else b"", value]
        out += [self._head, struct.pack(">H", len(self._interfaces) // 2), self._interfaces]
        for members in (self._fields, self._methods):
            out.append(struct.pack(">H", len(members)))
            for head, attributes in members:
                out += [head, _attributes_bytes(attributes)]
        return b"".join([*out, _attributes_bytes(self._attributes)])

    # --- constants --------------------------------------------------------------------------------------------

    def _constant(self, tag: int, value: bytes) -> int:
        if (tag, value) not in self._constants:
            self._constants.append((tag, value))
        return self._constants.index((tag, value))

    def _text(self, text: str) -> int:
        return self._constant(_UTF8, text.encode())

    def type(self, name: str) -> int:
        """Returns the number of a class, as in ``java/util/Map``."""
        return self._constant(_CLASS, struct.pack(">H", self._text(name)))

    def string(self, text: str) -> bytes:
        """Returns the number of a string, as instructions have it."""
        return struct.pack(">H", self._constant(_STRING, struct.pack(">H", self._text(text))))

    def field(self, owner: str, name: str, descriptor: str) -> bytes:
        """Returns the number of a field, as instructions have it."""
        return self._member(_FIELD, owner, name, descriptor)

    def method(self, owner: str, name: str, descriptor: str) -> bytes:
        """Returns the number of a method, as instructions have it."""
        return self._member(_METHOD, owner, name, descriptor)

    def interface_method(self, owner: str, name: str, descriptor: str) -> bytes:
        """Returns the number of an interface's method, as instructions have it."""
        return self._member(_INTERFACE_METHOD, owner, name, descriptor)

    def _member(self, tag: int, owner: str, name: str, descriptor: str) -> bytes:
        named = self._constant(_NAME_AND_TYPE, struct.pack(">HH", self._text(name), self._text(descriptor)))
        return struct.pack(">H", self._constant(tag, struct.pack(">HH", self.type(owner), named)))

    def rename(self, old: str, new: str) -> None:
        """Uses one class instead of another, everywhere. Raises ValueError if the class is not used."""
        self._constants[self._constants.index((_UTF8, old.encode()))] = _UTF8, new.encode()

    # --- methods ----------------------------------------------------------------------------------------------

    def code(self, name: str, descriptor: str) -> Code:
        """Returns a copy of a method's body. Raises KeyError if there is no such method."""
        signature = struct.pack(">HH", self._text(name), self._text(descriptor))
        method = next((method for head, method in self._methods if head[2:] == signature), None)
        if method is None:
            raise KeyError(name)
        source = _Reader(next(value for number, value in method if self._is_code(number)))
        stack, local = source.take(">H"), source.take(">H")
        body = source.read(source.take(">I"))
        caught = [Caught(*struct.unpack(">HHHH", source.read(8))) for _ in range(source.take(">H"))]
        attributes = {self._constants[number][1].decode(): value for number, value in source.attributes()}
        return Code(stack, local, body, caught, attributes)

    def set_code(self, name: str, descriptor: str, code: Code) -> None:
        """Gives a method another body; adds a public method if there is none."""
        caught = [
            struct.pack(">HHHH", handler.start, handler.end, handler.handler, handler.type) for handler in code.caught
        ]
        attributes = [(self._text(key), value) for key, value in code.attributes.items()]
        value = b"".join(
            [
                struct.pack(">HHI", code.stack, code.local, len(code.body)), code.body,
                struct.pack(">H", len(caught)), *caught, _attributes_bytes(attributes),
            ]
        )  # fmt: skip
        head = struct.pack(">HHH", 1, self._text(name), self._text(descriptor))
        attribute = self._text("Code"), value
        for own, attributes in self._methods:
            if own[2:] == head[2:]:
                attributes[:] = [attribute, *(attribute for attribute in attributes if not self._is_code(attribute[0]))]
                return
        self._methods.append((head, [attribute]))

    def _is_code(self, number: int) -> bool:
        return self._constants[number] == (_UTF8, b"Code")


def _attributes_bytes(attributes: list[tuple[int, bytes]]) -> bytes:
    parts = [struct.pack(">HI", name, len(value)) + value for name, value in attributes]
    return struct.pack(">H", len(parts)) + b"".join(parts)
