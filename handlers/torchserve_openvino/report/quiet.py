"""Keeps lines out of the log that other libraries write while they are imported, and that say nothing of a model."""

import logging

# torchao, which transformers and NNCF import, names each of its GPU extensions that does not load; torch warns about
# how torchao registers its types.
_NOISY = ("torchao", "torch.utils._pytree")
# It logs a traceback of a call that it can't trace, of which the report and the response have the reason.
_REPEATED = ("torch._subclasses.fake_tensor",)


def quiet_libraries() -> None:
    """Lets them log errors only, or nothing; imports nothing."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _REPEATED:
        logging.getLogger(name).setLevel(logging.CRITICAL)
