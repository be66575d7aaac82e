"""Computes the gradient of each node: by the rule of its override, or as TensorFlow registers it for the op type.

Every node of a program's graph carries `_gradient_op_type="gradrule"`, so TensorFlow calls `_dispatch` for its gradient
at top level, in loop bodies and in branches. An overridden node also carries `_gradrule_mark`. An overridden subgraph
is followed by an IdentityN with that mark. If gradients are differentiated again, the nodes that they made carry the
attribute too (`tf_private.use_gradrule_gradients`).
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import tensorflow as tf

from gradrule.v1 import errors_pb2, override_pb2, program_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.bound_rules import BoundRule
from gradrule_server.engine.checks import checked_gradient
from gradrule_server.engine.code_rules.target import Dependence, Gradient, RuleTarget, dense_upstream, ops_between
from gradrule_server.engine.gradient_templates import TEMPLATES, Signatures
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.op_gradients import as_list, gradient_of, takes_needed
from gradrule_server.engine.tf_errors import clean_message, error_message
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import ops_with
from gradrule_server.rules import salt_for

MARK_ATTR = "_gradrule_mark"

_GRADIENT_IS_ZERO = ops_with("zero_gradient")

_EXTENDED = "_rewritten"

_OWN_GRADIENT = -1
_FOREIGN_GRADIENT = -2
_NO_GRADIENT = -3
_VARIABLE_VALUE = -4

_ACTIVE = override_pb2.RESOLUTION_STATUS_ACTIVE
_OFF_PATH = override_pb2.RESOLUTION_STATUS_OFF_PATH
_NO_MATCH = override_pb2.RESOLUTION_STATUS_UNSPECIFIED

_NO_GRADIENT_RULES = {
    program_pb2.NO_GRADIENT_DEFAULT: "default",
    program_pb2.NO_GRADIENT_PASS: "pass",
    program_pb2.NO_GRADIENT_ZERO: "zero",
}

Reference = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class DifferentiationStage(enum.Enum):
    """Which differentiation of a program is built.

    FIRST: of the ys; all overrides apply. AGAIN: of the gradients of the first; overrides for every order apply.
    TRANSPOSE: of gradients by their upstream gradients, which makes a Jacobian-vector product of a vector-Jacobian
    product; no override applies, since the rules are part of these gradients already.
    """

    FIRST = enum.auto()
    AGAIN = enum.auto()
    TRANSPOSE = enum.auto()


class Differentiation:
    """Returns the gradients of nodes to TensorFlow while one program is built, and records the requested nodes.

    Only the first differentiation is recorded. `made`: rules for nodes that gradients make, by op type. `again`: the
    gradients will be differentiated again. `signatures`: describes the nodes of the imported graph for templates.
    """

    def __init__(
        self,
        marks: Sequence[link_pb2.MarkedNode],
        rules: Sequence[BoundRule],
        scopes: Mapping[str, str],
        no_gradient: program_pb2.NoGradient.ValueType,
        reference: Reference,
        dependence: Dependence,
        made: Sequence[link_pb2.MadeNode] = (),
        *,
        again: bool = False,
        signatures: Signatures,
    ) -> None:
        self._mark_count = len(marks)
        # Rules with an own gradient add to both lists.
        self._marks = list(marks)
        self._rules = list(rules)
        self._scopes = scopes
        self._no_gradient = no_gradient
        self._reference = reference
        self._dependence = dependence
        self._made: dict[str, tuple[int, int]] = {}
        for number, item in enumerate(made):
            self._made.setdefault(item.op_type, (number, item.rule))
        self._again = again
        self._signatures = signatures
        self._stage = DifferentiationStage.FIRST
        self._applied_made: set[int] = set()
        self._requested_marks: set[int] = set()
        self._other_rank: set[int] = set()
        self._defaulted: dict[str, None] = {}
        self._without_gradient: dict[str, str] = {}
        self._policy_uses = 0
        self._inside = 0

    @property
    def statuses(self) -> list[override_pb2.ResolutionStatus.ValueType]:
        """For each mark: ACTIVE if its gradient was requested, unspecified if the node has another rank."""
        return [
            _ACTIVE if index in self._requested_marks else _NO_MATCH if index in self._other_rank else _OFF_PATH
            for index in range(self._mark_count)
        ]

    @property
    def default_gradient_nodes(self) -> list[str]:
        """Nodes without a mark whose gradient was requested, from xs towards ys."""
        return [name for name in list(self._defaulted)[::-1] if name not in self._without_gradient]

    @property
    def without_gradient(self) -> list[override_pb2.Resolution]:
        """Nodes without a gradient, to which the `no_gradient` policy was applied, from xs towards ys."""
        return [
            override_pb2.Resolution(
                node=node,
                op_type=op_type,
                rule=_NO_GRADIENT_RULES[self._no_gradient],
                label="no_gradient",
                status=_ACTIVE,
            )
            for node, op_type in reversed(self._without_gradient.items())
        ]

    @property
    def made(self) -> list[int]:
        """Indices of the rules for nodes that gradients make which were applied."""
        return sorted(self._applied_made)

    @contextlib.contextmanager
    def active(self, stage: DifferentiationStage = DifferentiationStage.FIRST) -> Iterator[None]:
        """Makes `_dispatch` use this object within the context."""
        token = _current.set(self)
        self._stage, before = stage, self._stage
        try:
            yield
        finally:
            self._stage = before
            _current.reset(token)

    def gradient(self, op: tf.Operation, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        """Returns one gradient per input of `op`."""
        first = self._stage is DifferentiationStage.FIRST
        index = self._find_mark(op)
        if index is None:
            name = self._public_name(op)
            if name is None:
                return self._gradient_of_made(op, dys)
            if first and not self._inside:
                self._defaulted[name] = None
            return self._own_gradient(op, dys, name, only_needed=not self._inside)
        mark = self._marks[index]
        if mark.rule == _NO_GRADIENT:
            return [None] * len(op.inputs)
        if mark.rule == _VARIABLE_VALUE:
            return [dys[0]] * len(op.inputs)
        if first:
            self._requested_marks.add(index)
        holds = first or (mark.every_order and self._stage is DifferentiationStage.AGAIN)
        outputs = mark.outputs
        if mark.rule == _OWN_GRADIENT and outputs and first:
            gradients = self._subgraph_target(op, mark).own_gradients(list(dys)[:outputs])
            return [*([None] * outputs), *gradients, *([None] * (len(op.inputs) - outputs - len(gradients)))]
        if mark.rule == _OWN_GRADIENT or (mark.rule >= 0 and not holds):
            # The gradient of a subgraph's IdentityN continues through the nodes of the subgraph.
            return self._own_gradient(op, dys, mark.node)
        if mark.rule == _FOREIGN_GRADIENT:
            raise error(
                errors_pb2.ERROR_REASON_FOREIGN_GRADIENT,
                f"node {mark.node!r} ({op.type}) names the gradient {mark.foreign!r}, which exists only in the process "
                f"that made the graph. Upload the model as the Python client traces or loads it where TensorFlow is "
                f"(gr.trace, gr.load): then its gradients come along. Or override the node with a rule, or with "
                f"'default' for the op's own gradient.",
                node=mark.node,
            )
        rule = self._rules[mark.rule]
        target = self._subgraph_target(op, mark) if outputs else self._op_target(op, mark.node)
        upstream = list(dys)[: len(target.outputs)]
        identity = None if outputs else rule.identity(target)
        by_rule: Sequence[Gradient]
        if identity is None:
            by_rule = rule.gradients(target, upstream)
        else:
            by_rule = self._templated(
                op, dys, identity, mark.node, lambda: rule.gradients(target, upstream), rule.param_values
            )
        if rule.own_gradient is not None and self._again:
            by_rule = self._with_own_gradient(by_rule, target, upstream, rule.own_gradient)
        unseen = len(op.inputs) - outputs - len(by_rule)
        return [*([None] * outputs), *by_rule, *([None] * unseen)]

    def _with_own_gradient(
        self, gradients: Sequence[Gradient], target: RuleTarget, dys: Sequence[Gradient], rule: BoundRule
    ) -> Sequence[Gradient]:
        """Returns the gradients as outputs of a subgraph with a rule, whose inputs are the inputs of the first rule."""
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not given:
            return gradients
        # The rule needs every upstream gradient.
        upstream = dense_upstream(target.outputs, dys)
        results = [tf.convert_to_tensor(gradients[index]) for index in given]
        what = f"gradient of {target.what}"
        mark = link_pb2.MarkedNode(
            rule=len(self._rules), node=target.node, outputs=len(given), op_type=what, every_order=True
        )
        notes: dict[str, str | int] = {tf_private.GRADIENT_ATTR: tf_private.GRADIENT_NAME, MARK_ATTR: len(self._marks)}
        self._rules.append(rule)
        self._marks.append(mark)
        wrapper = tf_private.identity_n([*results, *target.inputs, *target.outputs, *upstream], notes)
        wrapped = list(gradients)
        for index, result in zip(given, wrapper, strict=False):
            wrapped[index] = result
        return wrapped

    def _gradient_of_made(self, op: tf.Operation, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        """Returns the gradients of a node that a gradient or a rule made."""
        if self._stage is not DifferentiationStage.FIRST:
            tf_private.use_gradrule_gradients_inside(op)
        number, rule = self._made.get(op.type, (0, _OWN_GRADIENT))
        if self._stage is not DifferentiationStage.AGAIN or op.type not in self._made:
            return self._own_gradient(op, dys, op.name)
        self._applied_made.add(number)
        if rule == _OWN_GRADIENT:
            return self._own_gradient(op, dys, op.name)
        return self._rules[rule].gradients(self._op_target(op, clean_message(op.name)), dys)

    def _find_mark(self, op: tf.Operation) -> int | None:
        """Returns the number of the mark that applies to the op, or None."""
        try:
            index: int | None = int(op.get_attr(MARK_ATTR))
        except ValueError:
            return None
        while index is not None:
            mark = self._marks[index]
            if not mark.HasField("rank"):
                return index
            rank = op.outputs[0].shape.rank
            if rank is None:
                raise error(
                    errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
                    f"an override asks for the rank of node {mark.node!r} ({op.type}), which is not known before "
                    f"running: give the placeholders shapes, or select without rank",
                    node=mark.node,
                )
            if rank == mark.rank:
                return index
            self._other_rank.add(index)
            index = mark.otherwise if mark.HasField("otherwise") else None
        return None

    def _op_target(self, op: tf.Operation, node: str) -> RuleTarget:
        graph = tf.compat.v1.get_default_graph()

        def own_gradients(dys: Sequence[Gradient]) -> Sequence[Gradient]:
            return self._own_gradient(op, dys, node)

        return RuleTarget(
            node=node,
            what=op.type,
            inputs=tuple(tf_private.in_graph(graph, value) for value in op.inputs),
            outputs=tuple(tf_private.in_graph(graph, value) for value in op.outputs),
            find_ops=lambda: (op,),
            own_gradients=own_gradients,
            reference=self._reference,
            sources=tuple(op.inputs),
            dependence=self._dependence,
            salt=salt_for(node),
            op=op,
        )

    def _subgraph_target(self, wrapper: tf.Operation, mark: link_pb2.MarkedNode) -> RuleTarget:
        """Returns the subgraph before an IdentityN that takes the outputs and then the inputs of the subgraph."""
        graph = tf.compat.v1.get_default_graph()
        inputs, outputs = list(wrapper.inputs), mark.outputs
        end = outputs + mark.inputs if mark.HasField("inputs") else len(inputs)
        ys, xs = inputs[:outputs], inputs[outputs:end]

        def find_ops() -> Sequence[tf.Operation]:
            # The input of a step is a difference that no other node of the forward graph uses.
            return [ys[0].op.inputs[0].op, ys[0].op] if mark.is_step else ops_between(xs, ys)

        def own_gradients(dys: Sequence[Gradient]) -> Sequence[Gradient]:
            # TensorFlow would take a missing upstream gradient as ones.
            pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if dy is not None]
            self._inside += 1
            try:
                return tf_private.gradients_in(wrapper.graph, [y for y, _ in pairs], xs, [dy for _, dy in pairs])
            finally:
                self._inside -= 1

        return RuleTarget(
            node=mark.node,
            what=mark.op_type,
            inputs=tuple(tf_private.in_graph(graph, value) for value in xs),
            # Outputs of the IdentityN: a second differentiation then reaches the rule.
            outputs=tuple(tf_private.in_graph(graph, value) for value in wrapper.outputs[: len(ys)]),
            find_ops=find_ops,
            own_gradients=own_gradients,
            reference=self._reference,
            sources=tuple(xs),
            dependence=self._dependence,
            salt=salt_for(mark.node),
        )

    def _own_gradient(
        self, op: tf.Operation, dys: Sequence[Gradient], node: str, *, only_needed: bool = False
    ) -> Sequence[Gradient]:
        """Returns the gradients of the op type; applies the policy if it has none.

        only_needed: Gradients of inputs that depend on no x may be left out.
        """
        try:
            function = gradient_of(op.type, self._dependence.may_depend if only_needed else None)
        except LookupError:
            return self._missing_gradient(
                op,
                dys,
                node,
                f"node {node!r}: op type {op.type!r} has no gradient. Override it with a rule, or cut the path with "
                f"stop_gradients=[{node!r}], or choose no_gradient='default', 'pass' or 'zero'.",
                known=False,
            )
        if function is None:
            if op.type in _GRADIENT_IS_ZERO:
                return [None] * len(op.inputs)
            return self._missing_gradient(
                op,
                dys,
                node,
                f"node {node!r}: TensorFlow registers {op.type!r} as not differentiable, so nothing would reach what "
                f"lies before it. Override it with a rule, cut the path on purpose with stop_gradients=[{node!r}], or "
                "choose no_gradient='default', 'pass' or 'zero'.",
                known=True,
            )
        needed = tuple(map(self._dependence.may_depend, op.inputs)) if only_needed and takes_needed(op.type) else ()
        return self._templated(op, dys, needed, node, lambda: self._registered(op, dys, node, function))

    def _templated(
        self,
        op: tf.Operation,
        dys: Sequence[Gradient],
        identity: Hashable,
        node: str,
        make: Callable[[], Sequence[Gradient]],
        params: Sequence[tf.Tensor] = (),
    ) -> Sequence[Gradient]:
        """Returns the gradients that `make` makes, from a template if there is one.

        `identity`: identifies what `make` does, besides the op. `params`: values that it uses besides the op's tensors.
        """
        found = self._signatures.key(op, dys, identity)
        if found is None:
            return make()
        key, outer = found
        count = self._policy_uses
        return TEMPLATES.gradients(key, node, [*outer, *params], make, lambda: self._policy_uses == count)

    @staticmethod
    def _registered(
        op: tf.Operation, dys: Sequence[Gradient], node: str, function: tf_private.GradientFunction
    ) -> Sequence[Gradient]:
        """Calls TensorFlow's gradient function. Raises NO_GRADIENT if it fails for the op."""
        try:
            return as_list(function(op, *dys))
        except GradruleError:
            raise
        except Exception as cause:
            # Gradient functions raise many types: NotImplementedError, ValueError, TypeError.
            raise error(
                errors_pb2.ERROR_REASON_NO_GRADIENT,
                f"node {node!r}: TensorFlow's gradient of {op.type!r} does not work here: "
                f"{clean_message(error_message(cause))}",
                node=node,
            ) from cause

    def _missing_gradient(
        self, op: tf.Operation, dys: Sequence[Gradient], node: str, message: str, *, known: bool
    ) -> Sequence[Gradient]:
        """Returns the gradients of an op without one, by the policy. Raises NO_GRADIENT if the policy refuses."""
        policy = self._no_gradient
        refuses = policy in (program_pb2.NO_GRADIENT_UNSPECIFIED, program_pb2.NO_GRADIENT_ERROR)
        if refuses or (policy == program_pb2.NO_GRADIENT_DEFAULT and not known):
            raise error(errors_pb2.ERROR_REASON_NO_GRADIENT, message, node=node)
        self._policy_uses += 1
        if self._stage is DifferentiationStage.FIRST:
            self._without_gradient[node] = op.type
        differentiable = [_is_differentiable(value) for value in op.inputs]
        if policy == program_pb2.NO_GRADIENT_ZERO:
            return [
                tf.zeros_like(value) if takes else None for value, takes in zip(op.inputs, differentiable, strict=True)
            ]
        gradients: list[Gradient] = [None] * len(op.inputs)
        if policy == program_pb2.NO_GRADIENT_PASS and any(differentiable) and dys[0] is not None:
            first = differentiable.index(True)
            dy = tf.convert_to_tensor(dys[0])
            gradients[first] = checked_gradient(dy, op.inputs[first], rule="pass", node=node, index=first)
        return gradients

    def _public_name(self, op: tf.Operation) -> str | None:
        """Returns the node's name in the uploaded graph; None for a node that a gradient made."""
        if op.name.startswith(IMPORT_SCOPE):
            return str(op.name).removeprefix(IMPORT_SCOPE)
        graph = getattr(op.graph, "name", "")
        # TensorFlow renames graphs of bodies that it extends by intermediate results for a second differentiation.
        while graph not in self._scopes and graph.endswith(_EXTENDED):
            graph = graph.removesuffix(_EXTENDED)
        scope = self._scopes.get(graph)
        return None if scope is None else f"{scope}/{op.name}"


_current: contextvars.ContextVar[Differentiation] = contextvars.ContextVar("differentiation")


def _is_differentiable(value: tf.Tensor) -> bool:
    return bool(value.dtype.is_floating or value.dtype.is_complex)


@tf.RegisterGradient(tf_private.GRADIENT_NAME)
def _dispatch(op: tf.Operation, *dys: Gradient) -> Sequence[Gradient]:
    return _current.get().gradient(op, dys)
