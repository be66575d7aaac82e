"""Defines one exception class per `ErrorReason`; the server and the client use the same reasons.

The docstring of each class gives the cause and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradrule.common.status_codes import DEFAULT_STATUS_CODE, STATUS_CODES
from gradrule.v1.errors_pb2 import ErrorReason

if TYPE_CHECKING:
    import grpc

_PREFIX = "ERROR_REASON_"


@dataclass(frozen=True, slots=True)
class Detail:
    """Describes one problem.

    Attributes:
        reason: Name of the `ErrorReason`, without its prefix.
        message: The problem and its remedy.
        node: Name of the node; empty if the problem concerns no node.
        field: Path of the request field; empty if the problem concerns no field.
    """

    reason: str
    message: str
    node: str = ""
    field: str = ""


class GradruleWarning(UserWarning):
    """Category of warnings: the server runs the request, but probably not what was wanted."""


class GradruleError(Exception):
    """Base class of all errors. The message gives the problem, its place, and the remedy.

    Attributes:
        message: The error's text.
        reason: Name of the `ErrorReason` without its prefix, such as `UNKNOWN_RULE`.
        code: The gRPC status code.
        details: All problems, including the first.
        findings_total: Number of all problems; larger than `len(details)` if the server did not send all of them.
        retry_delay: Seconds to wait before a retry; None if a retry does not help.
        request_id: Id of the call in the server's log; empty if the server sent no response.
    """

    REASON: ClassVar[str] = ""
    CODE: ClassVar[str] = DEFAULT_STATUS_CODE

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: str = "",
        details: Iterable[Detail] = (),
        retry_delay: float | None = None,
        findings_total: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.REASON
        self.code_name = code or self.CODE
        self.details = list(details) or [Detail(self.reason, message)]
        self.retry_delay = retry_delay
        self.request_id = ""
        self._is_unreached = False
        self.findings_total = len(self.details) if findings_total is None else findings_total

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        import grpc

        return grpc.StatusCode[self.code_name]

    def __str__(self) -> str:
        lines = [f"{self.reason}: {self.message}"]
        more = [detail for detail in self.details if detail.message != self.message]
        for detail in more:
            lines.append(f"  - {f'{detail.reason}: ' if detail.reason != self.reason else ''}{detail.message}")
        unsent = self.findings_total - len(self.details)
        if unsent > 0:
            lines.append(f"  … and {unsent} more")
        return "\n".join(lines)


class MalformedRequestError(GradruleError):
    """The server could not parse the request. Update the client; if the error persists, report it as a bug."""


class InvalidGraphError(GradruleError):
    """The bytes are not a GraphDef, or TensorFlow rejects the graph. The message may quote TensorFlow's error."""


class DuplicateNodeError(GradruleError):
    """Two nodes or two functions have the same name. Rename one of them."""


class DanglingInputError(GradruleError):
    """A node's input refers to a node that does not exist. Export the complete graph again."""


class GraphCycleError(GradruleError):
    """A node depends on itself, or a function calls itself. Express loops with the op `While`."""


class UnknownOpTypeError(GradruleError):
    """No op type has this name. Names are case-sensitive; use the name that is in the graph, such as `AddV2`."""


class InvalidAttrError(GradruleError):
    """An attribute is missing, unknown or of a wrong kind. Only attributes that inputs determine may be omitted."""


class TypeMismatchError(GradruleError):
    """A node has the wrong number of inputs, or an input has a wrong element type. Cast the inputs."""


class UnsupportedOpError(GradruleError):
    """gradrule does not run this TensorFlow op. Export with control flow version 2 and without file access."""


class InvalidTensorError(GradruleError):
    """A value is not a valid tensor: the bytes do not fit the shape, or TensorFlow lacks the element type."""


class UnknownTensorError(GradruleError):
    """The graph has no tensor with this name. A name is `node` or `node:output`; see the graph's `outputs`."""


class LimitExceededError(GradruleError):
    """The graph or rule is larger or deeper than a server setting allows. The message names the setting."""


class InvalidExpressionError(GradruleError):
    """A rule's expression has a syntax error. The message shows the column and what is allowed there."""


class InvalidRuleError(GradruleError):
    """A rule's definition is not valid, for example a plain constant: write `zeros_like(x)` instead."""


class UnknownRuleError(GradruleError):
    """No rule has this name. `client.list_rules()` lists all rules; names are case-sensitive."""


class RuleExistsError(GradruleError):
    """A rule with this name and different content exists. Choose another name, or delete that rule first."""


class RuleReadOnlyError(GradruleError):
    """OP and BUILTIN rules cannot be created or deleted. Choose another name."""


class UnknownParamError(GradruleError):
    """The rule has no such param, or no override has this label. The message lists the valid names."""


class MissingParamError(GradruleError):
    """A param without a default has no value. Set it in the override's `params` or in the call's `params`."""


class InvalidParamError(GradruleError):
    """A param's value is not a number or tensor that the rule accepts."""


class InvalidOverrideError(GradruleError):
    """An override has no selector or contradicts itself, or overrides are given without `ys`."""


class UnmatchedOverrideError(GradruleError):
    """An override matches no node. Correct its selector, or set `optional=True`."""


class InactiveOverrideError(GradruleError):
    """An override matches only nodes that no gradient reaches. `client.explain` shows why; or set `optional=True`."""


class RuleArityError(GradruleError):
    """A rule returns a wrong number of gradients. Return one for each input; `None` means not connected."""


class RuleOutputError(GradruleError):
    """A rule's gradient differs from its input in shape or type. Use `sum_to` or a cast in the rule."""


class RuleNotApplicableError(GradruleError):
    """The rule cannot be used for this op, for example because the op lacks an attribute that the rule reads."""


class ForeignGradientError(GradruleError):
    """A node's gradient is defined only in the process that created the graph. Override the node with a rule."""


class NoGradientError(GradruleError):
    """An op on the path from ys to xs has no gradient. Override it, or block it with `stop_gradient`."""


class InvalidDerivativeError(GradruleError):
    """`ys`, `xs`, `grad_ys` and `stop_gradients` are not consistent with each other."""


class MissingFeedError(GradruleError):
    """A placeholder that the result needs has no feed. The message names the placeholder."""


class UnknownFeedError(GradruleError):
    """A feed names a tensor that the graph does not have, or a tensor is fed twice."""


class FeedDtypeError(GradruleError):
    """A feed's element type differs from the tensor's. Lists are converted to the tensor's type; arrays are not."""


class FeedShapeError(GradruleError):
    """A feed's shape does not match its tensor's shape."""


class ProgramNotFoundError(GradruleError):
    """No program has this name: it was deleted, or it is on another server. Compile it again."""


class ProgramExistsError(GradruleError):
    """A program with this name and different content exists. Choose another name, or delete that program."""


class ExecutionFailedError(GradruleError):
    """A TensorFlow kernel failed while the program ran. The message is TensorFlow's."""


class EngineCrashedError(GradruleError):
    """The engine process that ran the program crashed. The next call uses a new engine, which may crash too."""


class EngineUnavailableError(GradruleError):
    """No engine is ready. Retry after `retry_delay` seconds, or call `client.wait_ready()`."""


class OverloadedError(GradruleError):
    """The server has too many requests, or its engines stayed in use until the deadline of the call.

    Retry after `retry_delay` seconds, with fewer concurrent calls.
    """


class MessageTooLargeError(GradruleError):
    """A message is larger than the server accepts. Send smaller messages, or raise `--max-message-bytes`."""


class DeadlineExceededError(GradruleError):
    """The call exceeded its `timeout`. The first call of a program includes compilation and is the slowest."""


class CancelledError(GradruleError):
    """The caller cancelled the call before it finished."""


class UnavailableError(GradruleError):
    """The server is not reachable: wrong address, not started, or stopping. The client has already retried."""


class UnsupportedError(GradruleError):
    """This version of the server or the client does not support the method or option."""


class InternalError(GradruleError):
    """The server has a bug. The message contains an id; search the server's log for it."""


class BlobNotFoundError(GradruleError):
    """The server does not have the blob with this hash. `client.upload` sends it."""


class BlobMismatchError(GradruleError):
    """The uploaded bytes do not match the announced hash: they were changed or damaged during the upload."""


class HandleExpiredError(GradruleError):
    """A forward handle was closed, has expired, or its engine ended. `ForwardHandle` repeats the run of a program."""


class QuotaExceededError(GradruleError):
    """The server's quota is used up. Delete some of these objects, or raise the setting in the message."""


class SharedMemoryLostError(GradruleError):
    """The server cannot access the shared memory of a call. Clients then send the tensors inline."""


class InvalidOptimizerError(GradruleError):
    """A session's optimizer is not in `gradrule.optimizers`, or Keras rejects one of its settings."""


class SessionLostError(GradruleError):
    """The engine or server that held the session ended, or the session was idle for long (`--session-idle-s`).

    Start a new one from the last result of `read` or `save`.
    """


class UnauthenticatedError(GradruleError):
    """The credential is missing or not valid. Set it with `connect(token=…)` or `GRADRULE_TOKEN`."""


class PermissionDeniedError(GradruleError):
    """The credential is valid but does not permit this call. Ask the server's administrator for permission."""


class OpNotAllowedError(GradruleError):
    """The server's policy forbids this op; the message gives the reason. Feed the op's result instead."""


class QuarantinedError(GradruleError):
    """The graph crashed an engine; the message says how. Change the graph, or retry after `retry_delay`."""


class MemoryExceededError(GradruleError):
    """The program needs more memory than an engine has. Feed smaller tensors, or raise the named setting."""


def class_name(reason: str) -> str:
    """Returns the class name for a reason: `UNKNOWN_RULE` → `UnknownRuleError`."""
    return "".join(part.capitalize() for part in reason.split("_")) + "Error"


def _classes() -> dict[str, type[GradruleError]]:
    found = {}
    by_name = {subclass.__name__: subclass for subclass in GradruleError.__subclasses__()}
    for text in ErrorReason.keys():  # noqa: SIM118  # an enum wrapper is not a dict
        reason = text.removeprefix(_PREFIX)
        # A reason without a class here is raised as the base class.
        if subclass := by_name.get(class_name(reason)):
            subclass.REASON, subclass.CODE = reason, STATUS_CODES.get(reason, DEFAULT_STATUS_CODE)
            found[reason] = subclass
    return found


BY_REASON: dict[str, type[GradruleError]] = _classes()


def reason_name(reason: int) -> str:
    """Returns the name of an `ErrorReason` without its prefix; the number as text if this client lacks the reason."""
    value = ErrorReason.DESCRIPTOR.values_by_number.get(reason)
    return str(reason) if value is None else value.name.removeprefix("ERROR_REASON_")


def error_for_reason(
    reason: str,
    message: str,
    *,
    code: str = "",
    details: Iterable[Detail] = (),
    retry_delay: float | None = None,
    findings_total: int | None = None,
) -> GradruleError:
    """Returns an error of the class for `reason`; of the base class if this client does not know the reason.

    Args:
        reason: Name of the `ErrorReason`, without its prefix.
        message: The error's text.
        code: Name of the gRPC status code; empty: the default code of the reason.
        details: All problems; empty: `message` alone.
        retry_delay: Seconds to wait before a retry; None if a retry does not help.
        findings_total: Number of all problems; None: the length of `details`.
    """
    return BY_REASON.get(reason, GradruleError)(
        message, reason=reason, code=code, details=details, retry_delay=retry_delay, findings_total=findings_total
    )
