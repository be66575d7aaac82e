"""Makes case number i of a fuzzing run: an RPC and its bytes, equal for equal number and seed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gradrule.v1 import evaluate_pb2, program_pb2, rule_pb2, session_pb2, tensor_pb2
from tests.battery.fuzzing import graphs
from tests.battery.fuzzing.expressions import expression
from tests.battery.fuzzing.mutations import Mutator, mutated_bytes, spliced_bytes
from tests.battery.fuzzing.seeds import Seeds, methods

_SERIALIZED = "gradrule.v1.GraphSource.serialized"


@dataclass(frozen=True)
class Case:
    """Holds messages for one RPC: one for most, several for client streams."""

    kind: str
    method: str
    messages: tuple[bytes, ...]

    def save(self, path: Path, **more: Any) -> None:
        """Writes JSON that `load` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        messages = [base64.b64encode(data).decode() for data in self.messages]
        path.write_text(json.dumps({"kind": self.kind, "method": self.method, "messages": messages} | more, indent=1))

    @staticmethod
    def load(path: Path) -> Case:
        """Reads what `save` wrote."""
        saved = json.loads(path.read_text())
        return Case(saved["kind"], saved["method"], tuple(base64.b64decode(text) for text in saved["messages"]))


class Cases:
    """Makes all cases of a run."""

    def __init__(self, seeds: Seeds, seed: int) -> None:
        self._seeds = seeds
        self._seed = seed
        self._methods = tuple(methods())
        self._inside = {_SERIALIZED: graphs.mutate_bytes(seeds.words)}

    def case(self, number: int) -> Case:
        """Makes one case."""
        chance = Random(f"{self._seed}/{number}")
        make = chance.choices([make for make, _ in _KINDS], [weight for _, weight in _KINDS])[0]
        return make(self, chance)

    def random_bytes(self, chance: Random) -> Case:
        """Makes random bytes, or bytes of a message changed at random."""
        method = chance.choice(self._methods)
        found = self._seeds.requests[method]
        drawn = chance.random()
        if drawn < 0.3:
            data = chance.randbytes(chance.choice((0, 1, 2, 8, 64, 1000, 20_000)))
        elif drawn < 0.8:
            data = mutated_bytes(chance, chance.choice(found))
        else:
            data = spliced_bytes(chance, chance.choice(found), chance.choice(self._any_request(chance)))
        return Case("bytes", method, (data,))

    def request(self, chance: Random) -> Case:
        """Changes a real request at one to four places."""
        method = chance.choice([name for name in self._methods if not methods()[name].requests_stream])
        message = methods()[method].request.FromString(chance.choice(self._seeds.requests[method]))
        self._mutator(chance).message(message)
        return Case("request", method, (message.SerializeToString(),))

    def graph(self, chance: Random) -> Case:
        """Changes a real graph, to be evaluated, compiled, checked, or used by a session."""
        message = self._graph_request(chance)
        graph = message.spec.graph
        graph.serialized = self._inside[_SERIALIZED](chance, graph.serialized)
        return self._sent(chance, "graph", message)

    def tensors(self, chance: Random) -> Case:
        """Sends a valid graph with values that may not fit it, or with changed arguments."""
        message = self._graph_request(chance)
        mutator = self._mutator(chance)
        for _ in range(chance.choice((1, 1, 2))):
            if chance.random() < 0.7 and message.feeds:
                mutator.message(chance.choice(message.feeds))
            else:
                kept = message.spec.graph.serialized
                message.spec.graph.ClearField("serialized")
                mutator.message(message)
                if message.WhichOneof("target") == "spec":
                    message.spec.graph.serialized = kept
        return self._sent(chance, "tensors", message)

    def rule(self, chance: Random) -> Case:
        """Uses an expression as a rule: registered, sampled, or as an override."""
        definition = rule_pb2.RuleDefinition(expression=expression(chance))
        for name in ("width", "alpha")[: chance.randrange(3)]:
            definition.params.add(name=name).default_value.number = chance.choice((0.0, 1.0, -1.0, 1e300))
        if chance.random() < 0.2:
            definition.gradient.expression = expression(chance)
        if chance.random() < 0.2:
            self._mutator(chance).message(definition)
        drawn = chance.random()
        if drawn < 0.3:
            name = "rules/" + chance.choice(("fuzz", "fuzz2", f"f{chance.randrange(10**6)}", *self._seeds.words))
            created = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(name=name, definition=definition))
            return Case("rule", "RuleService/CreateRule", (created.SerializeToString(),))
        if drawn < 0.6:
            sampled = rule_pb2.SampleRuleRequest(
                definition=definition, op_type=chance.choice(("", "Sign", "AddV2", "MatMul"))
            )
            for name in ("x", "x1", "y", "dy", "default")[: chance.randrange(1, 6)]:
                sampled.values.add(name=name).value.inline_tensor.CopyFrom(_values(chance))
            return Case("rule", "RuleService/SampleRule", (sampled.SerializeToString(),))
        message = self._graph_request(chance)
        del message.spec.overrides[:]
        override = message.spec.overrides.add(definition=definition, optional=chance.random() < 0.5)
        override.selector.op_type = chance.choice(("Sign", "Tanh", "Mul", "AddV2", "Square", "Sum"))
        if chance.random() < 0.3:
            self._mutator(chance).message(override)
        return self._sent(chance, "rule", message)

    def stream(self, chance: Random) -> Case:
        """Makes stream messages: valid, changed and random ones in any order, with reused ids."""
        pool = list(self._seeds.requests["GradientService/StreamEvaluate"])
        pool += [
            evaluate_pb2.StreamEvaluateRequest(evaluate=self._graph_request(chance)).SerializeToString(),
            evaluate_pb2.StreamEvaluateRequest(
                forward=evaluate_pb2.ForwardRequest(evaluate=self._graph_request(chance))
            ).SerializeToString(),
        ]
        sent = []
        for _ in range(chance.randrange(1, 8)):
            data = chance.choice(pool)
            if chance.random() < 0.6:
                message = evaluate_pb2.StreamEvaluateRequest.FromString(data)
                if chance.random() < 0.7:
                    message.request_id = chance.choice((0, 1, 2, 3, 2**64 - 1))
                if chance.random() < 0.6:
                    self._mutator(chance).message(message)
                data = message.SerializeToString()
            elif chance.random() < 0.3:
                data = mutated_bytes(chance, data)
            sent.append(data)
        return Case("stream", "GradientService/StreamEvaluate", tuple(sent))

    def session(self, chance: Random) -> Case:
        """Makes session messages; most begin with a valid start."""
        pool = self._seeds.requests["SessionService/RunSession"]
        starts = [data for data in pool if session_pb2.RunSessionRequest.FromString(data).HasField("start")]
        sent = []
        for number in range(chance.randrange(1, 7)):
            if number or chance.random() < 0.2:
                data = chance.choice(pool)
            elif chance.random() < 0.5:
                data = chance.choice(starts)
            else:
                spec = self._graph_request(chance).spec
                start = session_pb2.StartSession(graph=spec.graph, overrides=spec.overrides)
                data = session_pb2.RunSessionRequest(start=start).SerializeToString()
            if chance.random() < (0.6 if number else 0.2):
                message = session_pb2.RunSessionRequest.FromString(data)
                self._mutator(chance).message(message)
                data = message.SerializeToString()
            elif chance.random() < 0.1:
                data = mutated_bytes(chance, data)
            sent.append(data)
        return Case("session", "SessionService/RunSession", tuple(sent))

    def upload(self, chance: Random) -> Case:
        """Makes parts of a blob whose hash is right, wrong, missing, or changes between parts."""
        sent = []
        for _ in range(chance.randrange(0, 6)):
            message = methods()["BlobService/UploadBlob"].request.FromString(
                chance.choice(self._seeds.requests["BlobService/UploadBlob"])
            )
            if chance.random() < 0.6:
                self._mutator(chance).message(message)
            data = message.SerializeToString()
            sent.append(mutated_bytes(chance, data) if chance.random() < 0.2 else data)
        return Case("upload", "BlobService/UploadBlob", tuple(sent))

    def _mutator(self, chance: Random) -> Mutator:
        return Mutator(chance, self._seeds.words, self._inside)

    def _graph_request(self, chance: Random) -> evaluate_pb2.EvaluateRequest:
        return evaluate_pb2.EvaluateRequest.FromString(chance.choice(self._seeds.graphs))

    def _any_request(self, chance: Random) -> Sequence[bytes]:
        return self._seeds.requests[chance.choice(self._methods)]

    def _sent(self, chance: Random, kind: str, message: evaluate_pb2.EvaluateRequest) -> Case:
        """Wraps the request in one of the RPCs that accept a program."""
        drawn = chance.random()
        if drawn < 0.45:
            return Case(kind, "GradientService/Evaluate", (message.SerializeToString(),))
        if drawn < 0.9:
            check = program_pb2.CompileProgramRequest(spec=message.spec, validate_only=drawn < 0.8)
            return Case(kind, "ProgramService/CompileProgram", (check.SerializeToString(),))
        start = session_pb2.StartSession(graph=message.spec.graph, overrides=message.spec.overrides)
        first = session_pb2.RunSessionRequest(start=start)
        evaluate = session_pb2.SessionEvaluateRequest(
            feeds=message.feeds, fetches=message.spec.fetches, vjp=message.spec.vjp
        )
        second = session_pb2.RunSessionRequest(evaluate=evaluate)
        return Case(kind, "SessionService/RunSession", (first.SerializeToString(), second.SerializeToString()))


def _values(chance: Random) -> tensor_pb2.Tensor:
    """Makes a small float tensor; sometimes of another dtype or an unusual shape."""
    sizes = chance.choice(((3,), (3,), (3,), (), (0,), (2, 3), (1, 3), (-1,), (2**40, 2**40)))
    return tensor_pb2.Tensor(
        dtype=chance.choice(
            (tensor_pb2.DT_FLOAT,) * 6 + (tensor_pb2.DT_DOUBLE, tensor_pb2.DT_INT32, tensor_pb2.DT_STRING)
        ),
        tensor_shape=tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in sizes]),
        float_val=[
            chance.choice((0.0, 1.0, -2.5, float("nan"), float("inf"))) for _ in range(chance.choice((1, 1, 3)))
        ],
    )


_KINDS: tuple[tuple[Callable[[Cases, Random], Case], float], ...] = (
    (Cases.random_bytes, 25),
    (Cases.request, 31),
    (Cases.graph, 14),
    (Cases.tensors, 6),
    (Cases.rule, 12),
    (Cases.stream, 5),
    (Cases.session, 4),
    (Cases.upload, 3),
)
