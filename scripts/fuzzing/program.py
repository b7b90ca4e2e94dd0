"""A model as plain data: its inputs, its state, its lines; and the Python source that it stands for."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# A size is a number or the name of one that differs between calls.
Size = int | str
VALUE_NAME = re.compile(r"\b[vx]\d+\b")


@dataclass(frozen=True)
class Input:
    """One argument of `forward`.

    Attributes:
        name: Of the argument.
        shape: Numbers, and names of `Mode.sizes`.
        dtype: Of torch, without ``torch.``.
        kind: What values it has; see `values.py`.
        low: Least value of integers; a name stands for minus this size.
        high: Integers stay below it.
        layout: ``plain``, ``transposed``, ``strided`` (every second element) or ``offset``.
        same_as: Another input that is the very same tensor.
        grad: Whether it asks for its gradient, where gradients are on.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    kind: str = "normal"
    low: Size = 0
    high: Size = 4
    layout: str = "plain"
    same_as: str = ""
    grad: bool = True


@dataclass(frozen=True)
class Line:
    """One assignment of `forward`.

    Attributes:
        op: Its entry in the registry.
        code: An expression; ``{0}`` stands for the first of ``args``.
        args: Names of earlier values.
        out: Names that it defines; none for a statement.
        exact: Whether every correct implementation has the same bits.
        writes: Positions of arguments that it changes in place.
        uses: Modules, buffers and attributes that it needs.
    """

    op: str
    code: str
    args: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    exact: bool = False
    writes: tuple[int, ...] = ()
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mode:
    """How a program is compiled and called.

    Attributes:
        backend: ``openvino``, ``openvino_ts`` or ``export``.
        dynamic: As `tov.compile` takes it.
        frozen: Whether `freeze()` is called.
        grad: ``no_grad``, ``inference_mode`` or ``grad``.
        train: Whether the model is in training mode.
        sizes: Names of sizes to numbers, for each of the two sets of shapes.
        steps: What happens: ``A`` and ``B`` are calls with other values of the first sizes, ``C`` and ``D`` of the
            second, ``W`` changes the weights, ``X`` is a call with an index beyond the end.
        options: Of `tov.compile`.
        open: Which sizes one graph leaves open: ``sizes`` is those that have names, where they are not 1; ``ones`` is
            1 too; empty is none.
    """

    backend: str = "openvino"
    dynamic: bool | None = False
    frozen: bool = False
    grad: str = "no_grad"
    train: bool = False
    sizes: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))
    steps: str = "ABA"
    options: dict[str, Any] = field(default_factory=dict)
    open: str = ""


@dataclass(frozen=True)
class Program:
    """A model with its inputs and the way it is run.

    Attributes:
        seed: Of the values.
        inputs: Of `forward`.
        state: Attribute names of the module to source: modules, ``buffer`` and plain attributes.
        lines: In order.
        returns: Python expressions.
        form: What they are returned as: ``tuple``, ``list``, ``dict`` or ``nested``; a single one goes alone.
        mode: How it is run.
    """

    seed: int
    inputs: tuple[Input, ...]
    state: dict[str, str]
    lines: tuple[Line, ...]
    returns: tuple[str, ...]
    form: str
    mode: Mode

    def source(self, noisy: bool = False) -> str:
        """The module as Python; ``noisy`` passes what rounds through ``N``, which disturbs it."""
        used = {name for line in self.lines for name in line.uses} | {
            name for name in self.state if f"self.{name}" in self.returned
        }
        out = ["class Model(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
        for name, code in self.state.items():
            if name in used:
                made = code if code.startswith("self.") else f"self.{name} = {code}"
                out.append(f"        {made}")
        out += ["", f"    def forward(self{''.join(f', {i.name}' for i in self.inputs)}):"]
        out += [f"        {line_source(line, noisy)}" for line in self.lines]
        return "\n".join([*out, f"        return {self.returned}", ""])

    @property
    def returned(self) -> str:
        """The expression that `forward` returns."""
        parts = self.returns
        if len(parts) == 1:
            return parts[0]
        if self.form == "list":
            return f"[{', '.join(parts)}]"
        if self.form == "dict":
            return "{" + ", ".join(f'"r{i}": {part}' for i, part in enumerate(parts)) + "}"
        if self.form == "nested":
            return f"({parts[0]}, [{', '.join(parts[1:])}])"
        return ", ".join(parts)

    @property
    def open_axes(self) -> dict[int, tuple[int, ...]]:
        """Positions of inputs to the axes whose sizes have a name."""
        found = {
            position: tuple(axis for axis, size in enumerate(each.shape) if isinstance(size, str))
            for position, each in enumerate(self.inputs)
        }
        return {position: axes for position, axes in found.items() if axes}

    @property
    def results(self) -> frozenset[str]:
        """Names of the values that are returned, or looked at for it."""
        return frozenset(name for part in self.returns for name in VALUE_NAME.findall(part))

    def living(self) -> Program:
        """The program without lines that nothing returned depends on: what a compiler leaves out."""
        needed, kept = set(self.results), []
        for line in reversed(self.lines):
            # Parameters are only read; modules change their state, or draw random numbers, in training.
            has_effects = any(name[0] not in ("p" if self.mode.train else "mp") for name in line.uses)
            if has_effects or line.writes or not line.out or needed & set(line.out):
                kept.append(line)
                needed |= set(line.args)
        return replace(self, lines=tuple(reversed(kept)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Program:
        """What `to_dict` made, after JSON perhaps."""
        mode = dict(data["mode"])
        mode["sizes"] = tuple(mode["sizes"])
        return Program(
            seed=data["seed"],
            inputs=tuple(Input(**{**i, "shape": tuple(i["shape"])}) for i in data["inputs"]),
            state=dict(data["state"]),
            lines=tuple(
                Line(**{k: tuple(v) if isinstance(v, list) else v for k, v in x.items()}) for x in data["lines"]
            ),
            returns=tuple(data["returns"]),
            form=data["form"],
            mode=Mode(**mode),
        )

    def with_mode(self, **changes: Any) -> Program:
        """The same program run in another way."""
        return replace(self, mode=replace(self.mode, **changes))


def line_source(line: Line, noisy: bool = False) -> str:
    """One line of `forward`."""
    # A mean is subtracted inside of it, and what is left may be small: that depends on how the mean was rounded.
    cancels = noisy and line.op in {"normalization", "encoder_layer"}
    code = line.code.format(*(f"N({name})" if cancels else name for name in line.args))
    if noisy and not line.exact:
        if line.out:
            code = f"N({code})"
        elif line.writes:
            code = f"{code}; N({line.args[line.writes[0]]}, True)"
    return f"{', '.join(line.out)} = {code}" if line.out else code
