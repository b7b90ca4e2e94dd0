"""A handler for Hugging Face models, as users of TorchServe write them."""

# The form of Hugging Face's generalized handler: settings in the YAML's own section, a model for each mode, batches
# padded to one length, and a call of `generate`.
TRANSFORMERS = """
import json, os
import torch, transformers
from ts.torch_handler.base_handler import BaseHandler

class Transformers(BaseHandler):
    def __init__(self):
        super().__init__()
        self.initialized = False

    def initialize(self, ctx):
        self.manifest, folder = ctx.manifest, ctx.system_properties["model_dir"]
        self.device = torch.device("cpu")
        self.setup_config = ctx.model_yaml_config["handler"]
        self.mode = self.setup_config["mode"]
        kinds = {"sequence_classification": "SequenceClassification", "token_classification": "TokenClassification",
                 "question_answering": "QuestionAnswering", "text_generation": "CausalLM"}
        kind = getattr(transformers, "AutoModelFor" + kinds[self.mode])
        self.model = kind.from_pretrained(folder).to(self.device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model.eval()
        if "compile" in ctx.model_yaml_config.get("pt2", {}):
            raise RuntimeError("it would compile the model itself")
        if os.path.isfile(os.path.join(folder, "index_to_name.json")):
            with open(os.path.join(folder, "index_to_name.json")) as file:
                self.mapping = json.load(file)
        self.initialized = True

    def preprocess(self, requests):
        ids, mask = [], []
        for data in requests:
            text = data.get("data") or data.get("body")
            text = text.decode("utf-8") if isinstance(text, (bytes, bytearray)) else text
            texts = json.loads(text) if self.mode == "question_answering" else [text]
            inputs = self.tokenizer(*texts, max_length=int(self.setup_config["max_length"]), padding="max_length",
                                    truncation=True, return_tensors="pt")
            ids.append(inputs["input_ids"]), mask.append(inputs["attention_mask"])
        return torch.cat(ids), torch.cat(mask)

    @torch.inference_mode
    def inference(self, batch):
        ids, mask = batch
        if self.mode == "text_generation":
            found = self.model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
            return [self.tokenizer.decode(each) for each in found]
        found = self.model(ids, mask)
        if self.mode == "question_answering":
            spans = zip(found.start_logits.argmax(1).tolist(), found.end_logits.argmax(1).tolist())
            return [self.tokenizer.decode(row[start : end + 1]) for row, (start, end) in zip(ids.tolist(), spans)]
        if self.mode == "token_classification":
            return [[self.mapping[str(best)] for best in row.argmax(1).tolist()] for row in found[0]]
        return [self.mapping[str(row.unsqueeze(0).argmax(1).item())] for row in found[0]]

    def postprocess(self, found):
        return found
"""
