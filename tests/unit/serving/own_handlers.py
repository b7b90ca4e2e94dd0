"""Handlers as users write them, the models they serve, and their eager answers."""

import torch
from torch import nn
from ts.handler_utils.micro_batching import MicroBatching

from encoder import build
from torchserve_openvino import OpenVINOHandler
from torchserve_openvino.serving.torchserve.base import BaseHandler, worker_of

X = torch.linspace(-1, 1, 4)

NET = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.encoder(x))
    def twice(self, x):
        return self(x) + self(x)
    def scaled(self, x):
        return x @ self.head.weight
"""

COMPILE = "handler.openvino.compile"


def weights(path) -> None:
    """Saves the weights of `NET`."""
    torch.save(build(NET, "Network").state_dict(), path)


class Plain(OpenVINOHandler, BaseHandler):
    """Takes comma-separated numbers."""

    def preprocess(self, data):
        return torch.tensor([[float(v) for v in row["body"].decode().split(",")] for row in data])

    def postprocess(self, data):
        return data.tolist()


class Parts(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            hidden = self.model.encoder(data)
            return self.model.head(hidden)


class Method(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model.twice(data)


class Weights(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data) + torch.nn.functional.linear(data, self.model.encoder[0].weight[:3])


class Second(Plain):
    """Two models, one of them in a list."""

    def _load_pickled_model(self, *args):
        model = super()._load_pickled_model(*args)
        torch.manual_seed(1)
        self.others = [nn.Linear(3, 2).eval()]
        return model

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.others[0](self.model(data))


class NoGrad(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(data)


class WithGrad(Plain):
    def inference(self, data, *args, **kwargs):
        return self.model(data)

    def postprocess(self, data):
        return data.detach().tolist()


class Autocast(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(data).float()


class Nested(Plain):
    def inference(self, data, *args, **kwargs):
        with torch.inference_mode():
            return self.model({"x": data, "more": (data, [data])}, flag=True)


class Micro(Plain):
    def __init__(self):
        super().__init__()
        self.handle = MicroBatching(self, micro_batch_size=2)


BODY = ",".join(str(float(v)) for v in X).encode()

OTHER = b"0.5,-2,3,0.25"


def start(archive, handler_class, *, sample=True, batch_size=1, model=NET, save=weights, **section):
    folder_of = []

    def write(path) -> None:
        save(path)
        if sample:
            (path.parent / "sample.txt").write_bytes(BODY)
        folder_of.append(path.parent)

    own = {"warmup": {"samples": ["sample.txt"]} if sample else {}, **section}
    made = archive({"handler": {"openvino": own}}, model_file=model, weights=write, batch_size=batch_size)
    handler = handler_class()
    handler.initialize(made.context)
    return made, handler


def eager_answer(handler_class, made_handler, *bodies):
    """Returns what the handler answers without this package, on the same model."""
    one = object.__new__(handler_class)
    vars(one).update(
        model=worker_of(made_handler).eager_model, others=getattr(made_handler, "others", None),
        context=made_handler.context, device=made_handler.device,
    )  # fmt: skip
    data = handler_class.preprocess(one, [{"body": body} for body in bodies])
    return handler_class.postprocess(one, handler_class.inference(one, data))


def report_of(handler):
    report = handler.describe_handle()
    return report, {f["op"]: f for f in report["fallbacks"] if f["kind"] == "outside_compiled"}


class Explains(Plain):
    def get_insights(self, data, raw, target):
        rows = data.requires_grad_()
        self.model(rows).sum().backward()
        return rows.grad.tolist()


class MicroParts(Micro):
    inference = Parts.inference


class ListOnly(Plain):
    def initialize(self, context):
        super().initialize(context)
        self.model = [self.model.encoder, self.model.head]

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            for each in self.model:
                data = each(data)
            return data


class Container(Plain):
    def _load_pickled_model(self, *args):
        model = super()._load_pickled_model(*args)
        return nn.ModuleDict({"encoder": model.encoder, "head": model.head})

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model["head"](self.model["encoder"](data))


TEXT = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    def forward(self, ids, mask):
        hidden = self.first(self.embed(ids)).relu() * mask[..., None]
        return self.last(hidden.sum(1) / mask.sum(1, keepdim=True))
"""


def save_text(path) -> None:
    torch.save(build(TEXT, "Network").state_dict(), path)


class Text(Plain):
    """Pads the requests of a batch to the longest."""

    def preprocess(self, data):
        rows = [[int(float(v) * 10) % 50 for v in row["body"].decode().split(",")] for row in data]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows])
        return {"ids": ids, "mask": mask.long()}

    def inference(self, data, *args, **kwargs):
        with torch.no_grad():
            return self.model(**data)
