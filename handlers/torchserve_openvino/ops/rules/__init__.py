"""The rules of `ops.rule_registry`, by operator family; importing any of these modules imports them all."""

from torchserve_openvino.ops.rules import (
    complex_numbers as complex_numbers,
)
from torchserve_openvino.ops.rules import (
    division as division,
)
from torchserve_openvino.ops.rules import (
    elementwise as elementwise,
)
from torchserve_openvino.ops.rules import (
    embedding_bag as embedding_bag,
)
from torchserve_openvino.ops.rules import (
    images as images,
)
from torchserve_openvino.ops.rules import (
    indexing as indexing,
)
from torchserve_openvino.ops.rules import (
    layers as layers,
)
from torchserve_openvino.ops.rules import (
    logic as logic,
)
from torchserve_openvino.ops.rules import (
    matrices as matrices,
)
from torchserve_openvino.ops.rules import (
    ordering as ordering,
)
from torchserve_openvino.ops.rules import (
    quantized as quantized,
)
from torchserve_openvino.ops.rules import (
    recurrent as recurrent,
)
from torchserve_openvino.ops.rules import (
    reductions as reductions,
)
from torchserve_openvino.ops.rules import (
    shapes as shapes,
)
from torchserve_openvino.ops.rules.precision import (
    narrow_floats as narrow_floats,
)
from torchserve_openvino.ops.rules.precision import (
    narrow_integers as narrow_integers,
)
from torchserve_openvino.ops.rules.precision import (
    small_results as small_results,
)
