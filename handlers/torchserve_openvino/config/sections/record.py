"""The section `handler.openvino.record`: requests that are kept, to be measured with."""

from pydantic import BaseModel, model_validator

from torchserve_openvino.config.fields import Count, Folder, Positive, PythonFile
from torchserve_openvino.config.sections.tasks import SECTION


class RecordSection(BaseModel):
    """Keeps some requests as files, for `tune --requests` and `bench --requests`. Off without a folder."""

    model_config = SECTION

    folder: Folder | None = None
    """Folder (absolute path) for the bodies of requests that were answered; private to the user that the workers run
    as. They hold what clients sent: see `scrub`."""
    every: Count = 100
    """One request in so many is kept."""
    most: Count = 1000
    """Largest number of files in the folder; no more are kept then, and none is removed."""
    max_mb: Positive = 100.0
    """Largest size of all files together, in 10^6 bytes."""
    scrub: PythonFile | None = None
    """Python file in the archive (`--extra-files`) with `scrub(body: bytes, content_type: str) -> bytes | None`, which
    removes what must not be kept, or the whole request (None). A request on which it fails is not kept."""

    @model_validator(mode="after")
    def _has_folder(self) -> "RecordSection":
        if self.folder is None and self.model_fields_set:
            raise ValueError("has no effect without a folder: record: {folder: /var/lib/requests}.")
        return self
