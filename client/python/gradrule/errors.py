"""Defines one exception per `ErrorReason`, for errors of the server and of the client.

Each class's docstring says what went wrong and how to solve it.
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
        message: What is wrong and what would be right.
        node: Name of the node, or empty.
        field: Field of the request, or empty.
    """

    reason: str
    message: str
    node: str = ""
    field: str = ""


class GradruleError(Exception):
    """Is the base of all errors. The message says what is wrong, where, and what would be right.

    Attributes:
        message: The error's text.
        reason: Name of the `ErrorReason` without its prefix, such as `UNKNOWN_RULE`.
        code: The gRPC status code.
        details: All problems, the first one included.
        findings_total: Number of all problems; larger than the length of `details` if these did not fit.
        retry_delay: Seconds after which the same call may work; None: waiting does not help.
        request_id: Id of the call in the server's log; empty if the server did not answer.
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
    """The server could not read the request. Update the client, or report it: the client makes every request itself."""


class InvalidGraphError(GradruleError):
    """The bytes are no graph, or TensorFlow refuses it. The message is TensorFlow's where it names shapes or nodes."""


class DuplicateNodeError(GradruleError):
    """Two nodes, or two functions, have one name. Rename one."""


class DanglingInputError(GradruleError):
    """A node's input names something that is not there. The graph was cut or renamed; export it again."""


class GraphCycleError(GradruleError):
    """Nodes depend on themselves, or functions call themselves. Loops are written as `While`."""


class UnknownOpTypeError(GradruleError):
    """No op type has the name. Mind the case; renamed ops go by the name that the graph itself uses (`AddV2`)."""


class InvalidAttrError(GradruleError):
    """An attribute is missing, not the op's, or of the wrong kind. Only what follows from inputs may be left out."""


class TypeMismatchError(GradruleError):
    """A node's inputs are of the wrong number or element type. Cast them."""


class UnsupportedOpError(GradruleError):
    """TensorFlow has the op but gradrule does not run it. Export with control flow version 2, without file access."""


class InvalidTensorError(GradruleError):
    """A value cannot be sent as a tensor: bytes that do not fit its shape, or an element type that TensorFlow lacks."""


class UnknownTensorError(GradruleError):
    """The graph has no tensor of the name. Names are `node` or `node:output`; a graph's `outputs` list some."""


class LimitExceededError(GradruleError):
    """The graph or rule is larger or deeper than the server's settings allow. The message names the setting."""


class InvalidExpressionError(GradruleError):
    """A rule's expression cannot be read. The message points at the column and says what is allowed there."""


class InvalidRuleError(GradruleError):
    """A rule cannot be what it says, for example a plain constant: write `zeros_like(x)`."""


class UnknownRuleError(GradruleError):
    """No rule has the name. `client.list_rules()` tells them all; names are case-sensitive."""


class RuleExistsError(GradruleError):
    """The name belongs to a rule of other content. Choose another name, or delete that rule first."""


class RuleReadOnlyError(GradruleError):
    """OP and BUILTIN rules can be neither made nor deleted. Choose another name."""


class UnknownParamError(GradruleError):
    """The rule has no such param, or no override has the label. The message lists those that there are."""


class MissingParamError(GradruleError):
    """A param without a default needs a value, in the override's `params` or in the call's."""


class InvalidParamError(GradruleError):
    """A param's value is not a number or a tensor that the rule can take."""


class InvalidOverrideError(GradruleError):
    """An override has no selector, contradicts itself, or there are overrides without `ys`."""


class UnmatchedOverrideError(GradruleError):
    """An override matches no node. Correct its selector, or mark it `optional=True`."""


class InactiveOverrideError(GradruleError):
    """An override matches nodes that no gradient reaches. `client.explain` tells why; or mark it `optional=True`."""


class RuleArityError(GradruleError):
    """A rule gives more or fewer gradients than the op has inputs. Give a tuple, `None` where not connected."""


class RuleOutputError(GradruleError):
    """A rule's gradient has another shape or type than its input. `sum_to` and casts say aloud what should happen."""


class RuleNotApplicableError(GradruleError):
    """The rule cannot serve this op, for example an OP rule that reads an attribute that the op lacks."""


class ForeignGradientError(GradruleError):
    """A node names a gradient that lives in the process that made the graph. Override the node with a rule."""


class NoGradientError(GradruleError):
    """An op on the path has no gradient. Override it, or put it behind a `stop_gradient`."""


class InvalidDerivativeError(GradruleError):
    """`ys`, `xs`, `grad_ys` and `stop_gradients` do not fit together."""


class MissingFeedError(GradruleError):
    """A placeholder that the result needs was not fed. The message names it."""


class UnknownFeedError(GradruleError):
    """A feed names a tensor that the graph does not have, or one tensor is fed twice."""


class FeedDtypeError(GradruleError):
    """A feed has another element type than its tensor. Lists take the tensor's type; arrays must have it."""


class FeedShapeError(GradruleError):
    """A feed's shape does not fit its tensor."""


class ProgramNotFoundError(GradruleError):
    """No program has the name; it was deleted, or belongs to another server. Compile it again."""


class ProgramExistsError(GradruleError):
    """The wished name belongs to a program of other content. Choose another, or delete that program."""


class ExecutionFailedError(GradruleError):
    """A kernel failed while the program ran. The message is TensorFlow's."""


class EngineCrashedError(GradruleError):
    """The process that ran the program died. The next call meets a new one; the same graph may kill that too."""


class EngineUnavailableError(GradruleError):
    """No engine is ready yet. Try again after `retry_delay` seconds; `client.wait_ready()` waits for one."""


class OverloadedError(GradruleError):
    """The server has more requests than it takes. Try again after `retry_delay` seconds, with fewer in flight."""


class MessageTooLargeError(GradruleError):
    """A message is larger than the server takes. Send less at a time, or raise its `--max-message-bytes`."""


class DeadlineExceededError(GradruleError):
    """The call took longer than its `timeout`. The first call of a program compiles it and takes longest."""


class CancelledError(GradruleError):
    """The call was cancelled by its caller."""


class UnavailableError(GradruleError):
    """The server cannot be reached: wrong address, not started, or going away. The client has tried several times."""


class UnsupportedError(GradruleError):
    """This version of the server, or of the client, does not have the method or option."""


class InternalError(GradruleError):
    """A fault of the server's. The message holds a number to look for in its log."""


class BlobNotFoundError(GradruleError):
    """The server does not have bytes that the call names by their hash. `client.upload` sends them."""


class BlobMismatchError(GradruleError):
    """Uploaded bytes do not have the hash that was announced: they were damaged or changed on their way."""


class HandleExpiredError(GradruleError):
    """A forward handle was closed, lapsed, or lost with its engine. `ForwardHandle` runs forward again by itself."""


class QuotaExceededError(GradruleError):
    """The server keeps no more of this kind. Give up some of it, or raise the setting that the message names."""


class SharedMemoryLostError(GradruleError):
    """The server does not have the memory that a call shares with it. Clients then send tensors inline."""


class InvalidOptimizerError(GradruleError):
    """A session's optimiser is none of `gradrule.optimizers`, or has a setting that Keras does not take."""


class SessionLostError(GradruleError):
    """The engine that held the session died. Start another, from what `read` or `save` gave last."""


class UnauthenticatedError(GradruleError):
    """The server wants a credential, and got none that it knows. `connect(token=…)` takes one, `GRADRULE_TOKEN` too."""


class PermissionDeniedError(GradruleError):
    """The credential is known, but not allowed to do this. Ask whoever runs the server for one that is."""


class OpNotAllowedError(GradruleError):
    """The server does not run this op for strangers; the message says why. Feed what the op would have computed."""


class QuarantinedError(GradruleError):
    """The graph ended two engines. The message says how they ended; change the graph, or wait for `retry_delay`."""


class MemoryExceededError(GradruleError):
    """The program takes more memory than an engine has. Feed less at a time, or raise the setting that is named."""


def class_name(reason: str) -> str:
    """`UNKNOWN_RULE` → `UnknownRuleError`."""
    return "".join(part.capitalize() for part in reason.split("_")) + "Error"


def _classes() -> dict[str, type[GradruleError]]:
    found = {}
    by_name = {subclass.__name__: subclass for subclass in GradruleError.__subclasses__()}
    for text in ErrorReason.keys():  # noqa: SIM118  # an enum wrapper is no dict
        reason = text.removeprefix(_PREFIX)
        # A reason that a newer proto has and this file lacks is raised as the base class.
        if subclass := by_name.get(class_name(reason)):
            subclass.REASON, subclass.CODE = reason, STATUS_CODES.get(reason, DEFAULT_STATUS_CODE)
            found[reason] = subclass
    return found


BY_REASON: dict[str, type[GradruleError]] = _classes()


def reason_name(reason: int) -> str:
    """Returns the name of an `ErrorReason` without its prefix; its number if this client is older than the reason."""
    value = ErrorReason.DESCRIPTOR.values_by_number.get(reason)
    return str(reason) if value is None else value.name.removeprefix("ERROR_REASON_")


def of_reason(
    reason: str,
    message: str,
    *,
    code: str = "",
    details: Iterable[Detail] = (),
    retry_delay: float | None = None,
    findings_total: int | None = None,
) -> GradruleError:
    """The error of a reason; the base class where a newer server sends a reason that this client does not know."""
    return BY_REASON.get(reason, GradruleError)(
        message, reason=reason, code=code, details=details, retry_delay=retry_delay, findings_total=findings_total
    )
