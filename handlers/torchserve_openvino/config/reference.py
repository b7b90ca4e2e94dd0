"""Generates the reference of all keys from their declarations: a JSON schema for editors, tables for the docs."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from torchserve_openvino.config import vocabulary
from torchserve_openvino.config.options import BackendOptions
from torchserve_openvino.config.pt2 import MODES, CompileConfig
from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.config.torchserve_keys import BOOLEANS, INTEGERS, SECTIONS, WORDS

Schema = dict[str, Any]
_LIMIT_NAMES = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Key(NamedTuple):
    """One key, as a row of the tables.

    Attributes:
        name: Dotted, with its sections: ``batching.mode``.
        type: Accepted values, in Markdown.
        default: In Markdown; empty if there is none.
        help: What it does, on one line.
    """

    name: str
    type: str
    default: str
    help: str


def json_schema() -> Schema:
    """Returns the schema of a whole model-config.yaml, JSON Schema draft 2020-12."""
    section = _model_schema(OpenVINOSection)
    definitions = section.pop("$defs")
    properties: Schema = {name: {"type": "integer", "minimum": least} for name, least in INTEGERS.items()}
    properties |= {name: {"type": "boolean"} for name in sorted(BOOLEANS)}
    properties |= {name: {"enum": list(words)} for name, words in WORDS.items()}
    properties |= {name: {"type": "object"} for name in sorted((*SECTIONS, "torchrun"))}
    properties["deviceIds"] = {"type": "array", "items": {"type": "integer"}}
    properties["pt2"] = _pt2_schema()
    properties["handler"] = {"type": "object", "properties": {"openvino": {"$ref": "#/$defs/openvino"}}}
    return {
        "$schema": _DRAFT,
        "title": "model-config.yaml of torchserve-openvino",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {**definitions, "openvino": section, "options": options_schema()},
    }


def options_schema() -> Schema:
    """Returns the schema of `pt2.compile.options`."""
    schema = TypeAdapter(BackendOptions).json_schema()
    for name in ("decompositions", "disabled_ops"):
        # A single name is accepted as well.
        schema["properties"][name]["type"] = ["array", "string"]
    return {**schema, "description": "Options of the backend.", "additionalProperties": False}


def _model_schema(model: type[BaseModel]) -> Schema:
    schema: Schema = _standard(model.model_json_schema())
    return schema


def _standard(value: Any) -> Any:
    """Renames limits to the names of JSON Schema, where pydantic leaves those of annotated-types."""
    if isinstance(value, Mapping):
        return {_LIMIT_NAMES.get(name, name): _standard(item) for name, item in value.items()}
    return [_standard(item) for item in value] if isinstance(value, list) else value


def _pt2_schema() -> Schema:
    keys = CompileConfig.model_json_schema()["properties"]
    backend = {
        "anyOf": [{"enum": list(vocabulary.OURS)}, {"type": "string"}],
        "description": keys["backend"]["description"],
    }
    arguments: Schema = {
        "backend": backend,
        "dynamic": {"type": ["boolean", "null"], "description": keys["dynamic"]["description"]},
        "fullgraph": {"type": "boolean", "description": keys["fullgraph"]["description"]},
        "mode": {"enum": list(MODES), "description": keys["mode"]["description"]},
        # Other backends have options of their own.
        "options": {"anyOf": [{"$ref": "#/$defs/options"}, {"type": "object"}]},
    }
    export = {"type": "object", "properties": {"aot_compile": {"const": False}}, "additionalProperties": False}

    def mapping(properties: Schema) -> Schema:
        return {"type": "object", "properties": properties, "additionalProperties": False}

    compiled = mapping({"enable": {"type": "boolean"}, **arguments})
    forms = (mapping({"compile": compiled, "export": export}), mapping({"disable": {"type": "boolean"}, **arguments}))
    return {"anyOf": [backend, *forms]}


def section_keys() -> list[Key]:
    """Returns the keys of `handler.openvino`, in the order of their declaration."""
    return list(_keys(OpenVINOSection, ""))


def option_keys() -> list[Key]:
    """Returns the keys of `pt2.compile.options`."""
    properties = options_schema()["properties"]
    return [_key(name, entry) for name, entry in properties.items()]


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    properties = _model_schema(section)["properties"]
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from _keys(field.annotation, f"{prefix}{name}.")
            continue
        yield _key(prefix + name, properties[name])
        for item in get_args(field.annotation):
            if _is_section(item):
                yield from _keys(item, f"{prefix}{name}[].")


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    # issubclass rejects a generic alias such as list[str].
    return isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel)


def _key(name: str, entry: Mapping[str, Any]) -> Key:
    default = entry.get("default")
    shown = "" if default is None or default in ([], {}) else f"`{_yaml(default)}`"
    return Key(name, _type(entry), shown, " ".join(entry["description"].split()))


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type(entry: Mapping[str, Any]) -> str:
    """Describes the values that a schema accepts, in Markdown."""
    if "enum" in entry:
        return ", ".join(f"`{word}`" for word in entry["enum"])
    if "const" in entry:
        return f"`{entry['const']}`"
    kind = entry.get("type")
    if "anyOf" in entry or isinstance(kind, list):
        several = entry.get("anyOf") or [{**entry, "type": kind_} for kind_ in kind or ()]
        texts = [_type(variant) for variant in several if variant.get("type") != "null"]
        # A value or a list of such values is described as the list only.
        return " or ".join(text for text in texts if f"list of {text}" not in texts)
    if "$ref" in entry:
        return "mappings"
    if kind == "array":
        return f"list of {_type(entry['items'])}" if "items" in entry else "list"
    if kind == "object":
        more = entry.get("additionalProperties")
        return f"mapping to {_type(more)}" if isinstance(more, Mapping) else "mapping"
    if kind == "boolean":
        return "`true`, `false`"
    limits = [f"{sign} {_yaml(entry[name])}" for name, sign in _SIGNS.items() if name in entry]
    return " ".join([str(kind), " and ".join(limits)]).strip()


def markdown(keys: list[Key]) -> str:
    """Renders keys as a Markdown table."""
    rows = [f"| `{key.name}` | {key.type} | {key.default} | {key.help.replace('|', '/')} |" for key in keys]
    return "\n".join(["| Key | Values | Default | |", "| --- | --- | --- | --- |", *rows])
