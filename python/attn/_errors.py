# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one for each status of attn.h, each also the built-in exception that fits it."""
from ._types import Status


class Error(Exception):
    """What attn raises: `status`, a member of attn.Status, and `text`, which says what to do."""

    status = Status.OK

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class InvalidArgument(Error, ValueError):
    status = Status.EINVAL


class OutOfMemory(Error, MemoryError):
    status = Status.ENOMEM


class MemoryLimit(Error, MemoryError):
    """It does not fit in the memory limit that was given."""

    status = Status.ELIMIT


class Unsupported(Error, NotImplementedError):
    status = Status.EUNSUPPORTED


class InputOutput(Error, OSError):
    status = Status.EIO


class SpoolMismatch(Error, ValueError):
    """The spool belongs to another problem."""

    status = Status.EMISMATCH


class WorkerLost(Error, RuntimeError):
    status = Status.ELOST


class Canceled(Error, RuntimeError):
    status = Status.ECANCELED


BY_STATUS = {kind.status: kind for kind in Error.__subclasses__()}
