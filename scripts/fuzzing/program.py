"""A model as plain data (inputs, state, lines), and its Python source."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# A size is a number, or an expression of named sizes, which may differ between calls, and of the model's constants.
Size = int | str
CONSTANT_NAME = re.compile(r"\bn\d+\b")
VALUE_NAME = re.compile(r"\b[vx]\d+\b")


@dataclass(frozen=True)
class Input:
    """One argument of `forward`.

    Attributes:
        name: Name of the argument.
        shape: Numbers, names from `Mode.sizes` and `Program.constants`, and products of them.
        dtype: Torch dtype without ``torch.``.
        kind: Kind of values; see `values.py`.
        low: Least value of integers; may be the name of a size, or ``-name`` for its negative.
        high: Exclusive upper bound of integers; may be the name of a size.
        layout: ``plain``, ``transposed``, ``strided`` (every second element) or ``offset``.
        same_as: Name of another input that is the same tensor.
        grad: Whether it requires a gradient when gradients are on.
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
    """One line of `forward`.

    Attributes:
        op: Its entry in the registry.
        code: An expression or a statement; ``{0}`` stands for the first of ``args``.
        args: Names of earlier values.
        out: Names that it defines; none for a statement.
        exact: Whether every correct implementation computes the same bits.
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
        dynamic: Argument of `tov.compile`.
        frozen: Whether `freeze()` is called.
        grad: ``no_grad``, ``inference_mode`` or ``grad``.
        train: Whether the model is in training mode.
        sizes: Sizes by name, for each of the two sets of shapes.
        steps: ``A`` and ``B`` are calls with the first sizes and different values, ``C`` and ``D`` with the second;
            ``W`` changes the weights; ``X`` is a call with an index out of range.
        options: Options of `tov.compile`.
        open: Which sizes one graph leaves open: ``sizes`` for named sizes other than 1, ``ones`` for 1 too, empty for
            none.
        precision: OpenVINO's inference precision, ``f32`` or ``bf16``.
        threads: OpenVINO's number of threads.
        real_sizes: Whether the sizes are those of published models; such answers are compared more closely.
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
    precision: str = "f32"
    threads: int = 1
    real_sizes: bool = False

    @property
    def relative_tolerance(self) -> float:
        """The share of an output's largest value that rounding may change without a closer look."""
        if self.precision == "bf16":
            return 2e-2
        return 1e-5 if self.real_sizes else 1e-3

    @property
    def compile_options(self) -> dict[str, Any]:
        """Options of `tov.compile`."""
        config = {"INFERENCE_NUM_THREADS": self.threads, "INFERENCE_PRECISION_HINT": self.precision}
        return {"config": config, **self.options}


@dataclass(frozen=True)
class Program:
    """A model with its inputs and the way it is run.

    Attributes:
        seed: Seed of the values.
        inputs: Inputs of `forward`.
        state: Source of the module's attributes by name: modules, parameters, buffers and plain attributes.
        lines: Lines of `forward`, in order.
        returns: Returned Python expressions.
        form: Their container: ``tuple``, ``list``, ``dict`` or ``nested``; a single expression has none.
        mode: How it is run.
        constants: Sizes by name that are the same in every call; state and lines name them too.
    """

    seed: int
    inputs: tuple[Input, ...]
    state: dict[str, str]
    lines: tuple[Line, ...]
    returns: tuple[str, ...]
    form: str
    mode: Mode
    constants: dict[str, int] = field(default_factory=dict)

    def source(self, noisy: bool = False) -> str:
        """The module as Python; ``noisy`` passes results that round through ``N``, which disturbs them."""
        rounds_all = self.mode.precision != "f32"
        used = {name for line in self.lines for name in line.uses} | {
            name for name in self.state if f"self.{name}" in self.returned
        }
        out = ["class Model(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
        for name, code in self.state.items():
            if name in used:
                statement = code if code.startswith("self.") else f"self.{name} = {code}"
                out.append(f"        {statement}")
        out += ["", f"    def forward(self{''.join(f', {i.name}' for i in self.inputs)}):"]
        out += [f"        {line_source(line, noisy, rounds_all)}" for line in self.lines]
        text = "\n".join([*out, f"        return {self.returned}", ""])
        return CONSTANT_NAME.sub(lambda match: str(self.constants[match.group()]), text)

    def sizes_of(self, step: str) -> dict[str, int]:
        """All sizes by name, in a call of one letter of `Mode.steps`."""
        return {**self.constants, **self.mode.sizes[step in "CD"]}

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
        """Maps positions of inputs to their axes with named sizes."""
        named = self.mode.sizes[0]
        values = {
            position: tuple(axis for axis, size in enumerate(spec.shape) if size in named)
            for position, spec in enumerate(self.inputs)
        }
        return {position: axes for position, axes in values.items() if axes}

    @property
    def results(self) -> frozenset[str]:
        """Names of the values in the returned expressions."""
        return frozenset(name for part in self.returns for name in VALUE_NAME.findall(part))

    def living(self, writes: bool = True) -> Program:
        """The program without dead lines, which a compiler leaves out.

        Args:
            writes: Whether to keep a line that writes in place to a value that no later line names.
        """
        needed, kept = set(self.results), []
        for line in reversed(self.lines):
            # Parameters are only read; in training, modules change their state or draw random numbers.
            has_effects = any(name[0] not in ("p" if self.mode.train else "mp") for name in line.uses)
            written = bool(line.writes) or not line.out
            if has_effects or (written and (writes or needed & set(line.args))) or needed & set(line.out):
                kept.append(line)
                needed |= set(line.args)
        return replace(self, lines=tuple(reversed(kept)))

    def without_unused_constants(self) -> Program:
        """The program with the constants that it names."""
        texts = [*self.state.values(), *(line.code for line in self.lines), *self.returns]
        texts += [str(size) for spec in self.inputs for size in (*spec.shape, spec.low, spec.high)]
        used = {name for text in texts for name in CONSTANT_NAME.findall(text)}
        return replace(self, constants={name: size for name, size in self.constants.items() if name in used})

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Program:
        """The program from the result of `to_dict`, also after JSON."""
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
            constants=dict(data.get("constants", {})),
        )

    def with_mode(self, **changes: Any) -> Program:
        """The same program with a changed mode."""
        return replace(self, mode=replace(self.mode, **changes))


def line_source(line: Line, noisy: bool = False, rounds_all: bool = False) -> str:
    """One line of `forward`.

    Args:
        line: The line.
        noisy: Whether results that round pass through ``N``.
        rounds_all: Whether every operator rounds, as in a lower precision.
    """
    # These subtract a mean, and a small remainder depends on how the mean was rounded.
    cancels = noisy and line.op in {"normalization", "encoder_layer"}
    code = line.code.format(*(f"N({name})" if cancels else name for name in line.args))
    if noisy and (rounds_all or not line.exact):
        if line.out:
            code = f"N({code})"
        elif line.writes:
            code = f"{code}; N({line.args[line.writes[0]]}, True)"
    return f"{', '.join(line.out)} = {code}" if line.out else code
