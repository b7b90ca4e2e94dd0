"""Sizes of pictures."""

from dataclasses import dataclass

from torchserve_openvino.config.fields import PICTURE_SIZE


@dataclass(frozen=True)
class Size:
    """Width and height in pixels; as text ``512x512``."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def of(cls, text: str) -> "Size":
        """Reads ``WIDTHxHEIGHT``.

        Raises:
            ValueError: It is something else.
        """
        match = PICTURE_SIZE.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"a size is width x height in pixels, such as 512x512, not {text[:40]!r}")
        return cls(int(match[1]), int(match[2]))
