"""A Keras layer that runs on a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from gradrule._client import Client, connect
from gradrule._overrides import Overrides
from gradrule._requests import CallParams
from gradrule.errors import GradruleError, InvalidGraphError, UnsupportedError
from gradrule.keras._part import traced
from gradrule.keras._programs import RemotePart, RemoteWords
from gradrule.keras._selection import Keyed


@keras.saving.register_keras_serializable("gradrule")
class RemoteLayer(keras.layers.Layer):  # type: ignore[misc]
    """Part of a Keras model that runs on a server, forward and backward, and trains as if it ran here.

    part: a Keras layer, `Sequential` or model, or a list of layers, which becomes a `Sequential`; it may belong to a
    larger model, whose weights it then shares. It takes one structure of tensors, as Keras models do: a tensor, or a
    list or dict of them, of any numeric type; so it gives. A layer with several arguments goes into a functional model
    first. client: a `gr.Client`, or an address `host:port`, which is connected to at the first call. overrides: of the
    gradients within the part: what `client.evaluate` takes, or a dict as for `gradrule.keras.overrides`, which knows
    layers. params: values for them by label; the attribute `params` may be set at any time, and compiles nothing.
    They matter in the backward pass alone, which raises what is wrong with them. no_gradient: as for
    `client.evaluate`. timeout: seconds for each request; the first ones compile.

    The weights stay here, as Keras variables of the part: optimizers, checkpoints and summaries see them. Each call
    sends them with the inputs; the backward pass sends both again, with upstream gradients, and gets gradients of
    the trainable weights and of the inputs: dense ones, of embeddings too, and zeros where the outputs do not depend on
    them. Moving averages, seeds of dropout, losses that layers add, masks, and mixed precision are as they are without
    the server. A call works eagerly and within `tf.function`, not under XLA: Keras drops `jit_compile`. Second
    derivatives raise `NotImplementedError`.

    Saving the model's weights saves the part's. Saving the model saves the part, the server's address, and overrides
    that are a dict of strings; after loading, `client` may be set to one with credentials.

    Raises what the client raises. Within `tf.function`, and so in `model.fit`, TensorFlow wraps the error in one of its
    own that has the message; `last_error` is the error itself. `UnsupportedError`: a part with state that Keras does
    not know, Keras on another backend, or a configuration that cannot be saved.
    """

    def __init__(
        self,
        part: Any,
        client: Client | str,
        *,
        overrides: Overrides | Keyed | None = None,
        params: CallParams | None = None,
        no_gradient: str = "error",
        timeout: float | None = None,
        name: str | None = None,
        trainable: bool = True,
    ) -> None:
        # The part casts for itself, as it would without this layer around it.
        super().__init__(name=name, trainable=trainable, dtype="float32", autocast=False)
        if keras.config.backend() != "tensorflow":
            raise UnsupportedError(f"Keras runs on {keras.config.backend()}; RemoteLayer needs its TensorFlow backend")
        if isinstance(part, list | tuple):
            part = keras.Sequential(list(part))
        if not isinstance(part, keras.layers.Layer):
            raise InvalidGraphError(f"{type(part).__name__} is no Keras layer, model, or list of layers")
        self.part = part
        self.supports_masking = True
        self.supports_jit = False
        if not trainable:
            part.trainable = False
        # In an object of its own, for Keras takes attributes apart that are dicts and lists.
        self._remote = _Remote(RemoteWords(lambda: self.client, overrides, params, no_gradient, timeout), client)

    @property
    def client(self) -> Client:
        """The client in use. Setting it makes the next call use, and compile on, another server."""
        return self._remote.connected()

    @client.setter
    def client(self, client: Client | str) -> None:
        self._remote.connect_to(client)

    @property
    def params(self) -> CallParams | None:
        """Values of rules' params by label, for the calls to come."""
        return self._remote.words.params

    @params.setter
    def params(self, params: CallParams | None) -> None:
        self._remote.words.params = params

    @property
    def last_error(self) -> GradruleError | None:
        """The last error of a call, as the client raised it."""
        return self._remote.words.error

    def release(self) -> None:
        """Makes the server forget the layer's programs. The next call compiles them again."""
        self._remote.release()

    def build(self, input_shape: Any) -> None:
        """Makes nothing: the part builds itself when it meets inputs, which tell their types too."""
        self.built = True

    def compute_output_spec(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Shapes and dtypes of the part's outputs."""
        self._build_part(inputs)
        outputs = self.part.compute_output_spec(inputs)
        return keras.tree.map_structure(lambda output: keras.KerasTensor(output.shape, output.dtype), outputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Shapes of the part's outputs."""
        return self.part.compute_output_shape(input_shape)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Nothing: outputs come with the masks that the part gave them."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """The part's outputs for its inputs."""
        self._build_part(inputs)
        tensors = [tf.convert_to_tensor(tensor) for tensor in keras.tree.flatten(inputs)]
        masks = [None] * len(tensors) if mask is None else keras.tree.flatten(mask)
        remote = self._remote.part_for(self.part, inputs, tensors, masks, bool(training))
        found = remote.traced
        state = self.part.non_trainable_variables
        outputs = remote(
            [
                *(tf.convert_to_tensor(variable.value) for variable in self.part.trainable_variables),
                *(tf.convert_to_tensor(variable.value) for variable in state),
                *tensors,
                *(tf.convert_to_tensor(given) for given in masks if given is not None),
            ]
        )
        rest = iter(outputs[found.n_outputs :])
        for index in found.updated:
            state[index].assign(next(rest))
        for _ in range(found.n_losses):
            self.add_loss(next(rest))
        for index in found.masked:
            outputs[index]._keras_mask = next(rest)
        return keras.tree.pack_sequence_as(found.structure, outputs[: found.n_outputs])

    def get_config(self) -> dict[str, Any]:
        """What `from_config` takes. Raises `UnsupportedError` for overrides that are no dict of strings."""
        words = self._remote.words
        return {
            "name": self.name,
            "trainable": self.trainable,
            "part": keras.saving.serialize_keras_object(self.part),
            "client": self._remote.target,
            "overrides": _plain(words.overrides),
            "params": None if words.params is None else {label: dict(given) for label, given in words.params.items()},
            "no_gradient": words.no_gradient,
            "timeout": words.timeout,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RemoteLayer:
        """The layer of a configuration; it connects anew, without credentials, at its first call."""
        part = keras.saving.deserialize_keras_object(config["part"])
        overrides = config["overrides"]
        if overrides is not None:
            overrides = {
                key: tuple(value) if isinstance(value, list | tuple) else value for key, value in overrides.items()
            }
        return cls(**{**config, "part": part, "overrides": overrides})

    def _build_part(self, inputs: Any) -> None:
        if not self.part.built:
            self.part(keras.tree.map_structure(lambda tensor: keras.KerasTensor(tensor.shape, tensor.dtype), inputs))


class _Remote:
    """A layer's client and traced parts."""

    def __init__(self, words: RemoteWords, client: Client | str) -> None:
        self.words = words
        self._parts: dict[Any, RemotePart] = {}
        self._client: Client | None = None
        self.target = ""
        self.connect_to(client)

    def connect_to(self, client: Client | str) -> None:
        if not isinstance(client, Client | str):
            raise UnsupportedError(f"a RemoteLayer takes a gr.Client or an address, not {type(client).__name__}")
        self._client = client if isinstance(client, Client) else None
        self.target = client.target if isinstance(client, Client) else client
        self._parts.clear()

    def connected(self) -> Client:
        if self._client is None:
            self._client = connect(self.target)
        return self._client

    def part_for(
        self, part: Any, inputs: Any, tensors: Sequence[Any], masks: Sequence[Any], training: bool
    ) -> RemotePart:
        """The traced part for inputs of this structure and these types, in this mode."""
        specs = [_spec(tensor) for tensor in tensors]
        mask_specs = [None if mask is None else _spec(mask) for mask in masks]
        structure = keras.tree.map_structure(lambda _: 0, inputs)
        frozen = tuple(layer.trainable for layer in part._flatten_layers())
        key = (repr(structure), tuple(specs), tuple(mask_specs), frozen, training)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = RemotePart(traced(part, structure, specs, mask_specs, training), self.words)
        return found

    def release(self) -> None:
        for part in self._parts.values():
            part.release()


def _spec(tensor: Any) -> tuple[str, tuple[int | None, ...] | None]:
    """Dtype and shape; the size of the batch is left open, so that it decides nothing."""
    shape = None if tensor.shape.rank is None else tuple(tensor.shape)
    return keras.backend.standardize_dtype(tensor.dtype), (None, *shape[1:]) if shape else shape


def _plain(overrides: Any) -> dict[str, Any] | None:
    if overrides is None:
        return None
    if isinstance(overrides, Mapping) and all(isinstance(key, str) for key in overrides):
        values = {key: value if isinstance(value, str) else list(value) for key, value in overrides.items()}
        if all(isinstance(value, str) or isinstance(value[0], str) for value in values.values()):
            return values
    raise UnsupportedError(
        "the overrides of this RemoteLayer cannot be saved with the model; a dict of strings can: layers and op "
        "types by name to names of rules, or to (rule, params)"
    )
