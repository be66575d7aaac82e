"""Defines a Keras layer that runs on a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from gradrule._builder.overrides import Overrides
from gradrule._messages.call_arguments import CallParams, NoGradient
from gradrule._rpc.sync_client.client import Client, connect
from gradrule.errors import GradruleError, InvalidGraphError, UnsupportedError
from gradrule.keras._part import traced
from gradrule.keras._part_calls import RemoteOptions
from gradrule.keras._remote_part import RemotePart
from gradrule.keras._selection import Keyed


@keras.saving.register_keras_serializable("gradrule")
class RemoteLayer(keras.layers.Layer):  # type: ignore[misc]
    """Runs part of a Keras model on a server, forward and backward; it trains like a local layer.

    The weights are Keras variables of the local part: optimizers, checkpoints and summaries see them. Each call sends
    the weights and inputs. If a gradient may follow, the server keeps the forward run; the backward pass sends only the
    upstream gradients, and gets gradients of the trainable weights and of the inputs (zeros if the outputs do not
    depend on them; `tf.IndexedSlices` of weights that are only gathered, such as embeddings). The part runs once, so
    its random numbers are those of the forward pass. Moving averages, weights that the part assigns, dropout seeds,
    states of recurrent layers, losses that layers add, masks and mixed precision work as in a local layer. A call works
    eagerly and within `tf.function`, but not under XLA: Keras drops `jit_compile`.

    Second derivatives (a tape within a tape, forward accumulators) work too; the server then runs the part again, so
    the part must not draw random numbers without a Keras seed. The same holds for a gradient after the server lost the
    forward run.

    Saving the model's weights saves the part's weights. Saving the model saves the part, the server's address, and
    overrides that are a dict of strings; after loading, `client` may be set to a client with credentials.

    Args:
        part: a Keras layer, `Sequential` or model, or a list of layers, which becomes a `Sequential`. It may belong to
            a larger model and then shares its weights. It takes and returns one tensor, or a list or dict of tensors,
            of any numeric dtype. Wrap a layer with several arguments in a functional model.
        client: a `gr.Client`, or an address `host:port` to connect to at the first call.
        overrides: overrides within the part, as for `client.evaluate`, or a dict as for `gradrule.keras.overrides`.
            They affect only the backward pass, which raises their errors.
        params: values of the rules' params by label. Setting the attribute `params` later compiles nothing.
        no_gradient: as for `client.evaluate`.
        timeout: seconds for each request, compiling included; default: that of the client, which gives compiling more.
        name: name of the layer.
        trainable: whether the part's weights are trained.

    Raises:
        GradruleError: a call failed, as in `client.evaluate`. When a step of `tf.function`, and so of `model.fit`,
            runs, TensorFlow raises an error of its own with the same message; `last_error` is the original error.
        InvalidGraphError: `part` is not a layer, model or list of layers.
        HandleExpiredError: the server lost the forward run, and the part draws random numbers without a Keras seed.
        UnsupportedError: the part uses variables that are not Keras variables, or contains a RemoteLayer; Keras runs on
            another backend; the configuration cannot be saved; third derivatives; or second derivatives of a part that
            draws random numbers without a Keras seed.
    """

    def __init__(
        self,
        part: Any,
        client: Client | str,
        *,
        overrides: Overrides | Keyed | None = None,
        params: CallParams | None = None,
        no_gradient: NoGradient = "error",
        timeout: float | None = None,
        name: str | None = None,
        trainable: bool = True,
    ) -> None:
        # Disable autocast: the part casts its inputs itself.
        super().__init__(name=name, trainable=trainable, dtype="float32", autocast=False)
        if keras.config.backend() != "tensorflow":
            raise UnsupportedError(f"Keras runs on {keras.config.backend()}; RemoteLayer needs its TensorFlow backend")
        if isinstance(part, list | tuple):
            part = keras.Sequential(list(part))
        if not isinstance(part, keras.layers.Layer):
            raise InvalidGraphError(f"{type(part).__name__} is no Keras layer, model, or list of layers")
        _refuse_remote_layers(part)
        self.part = part
        self.supports_masking = True
        self.supports_jit = False
        if not trainable:
            part.trainable = False
        # Use a separate object, because Keras wraps attributes that are dicts and lists.
        self._remote = _Remote(RemoteOptions(lambda: self.client, overrides, params, no_gradient, timeout), client)

    @property
    def client(self) -> Client:
        """The client in use. After setting it, the next call compiles on the new server."""
        return self._remote.connected()

    @client.setter
    def client(self, client: Client | str) -> None:
        self._remote.connect_to(client)

    @property
    def params(self) -> CallParams | None:
        """Values of the rules' params by label, for later calls."""
        return self._remote.options.params

    @params.setter
    def params(self, params: CallParams | None) -> None:
        self._remote.options.params = params

    @property
    def last_error(self) -> GradruleError | None:
        """The last error of a call, as the client raised it."""
        return self._remote.options.error

    def release(self) -> None:
        """Deletes the layer's programs on the server; the next call compiles them again."""
        self._remote.release()

    def build(self, input_shape: Any) -> None:
        """Does nothing: the part is built at the first call, when the inputs' dtypes are known."""
        self.built = True

    def compute_output_spec(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns shapes and dtypes of the part's outputs."""
        self._build_part(inputs)
        outputs = self.part.compute_output_spec(inputs)
        return keras.tree.map_structure(lambda output: keras.KerasTensor(output.shape, output.dtype), outputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns shapes of the part's outputs."""
        return self.part.compute_output_shape(input_shape)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None: the outputs already have the masks that the part gave them."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Returns the part's outputs for its inputs."""
        self._build_part(inputs)
        tensors = [tf.convert_to_tensor(tensor) for tensor in keras.tree.flatten(inputs)]
        masks = [None] * len(tensors) if mask is None else keras.tree.flatten(mask)
        remote = self._remote.part_for(self.part, inputs, tensors, masks, bool(training))
        found = remote.traced
        variables = [*self.part.trainable_variables, *found.state]
        outputs = remote(
            [
                *(tf.convert_to_tensor(variable.value) for variable in variables),
                *tensors,
                *(tf.convert_to_tensor(given) for given in masks if given is not None),
            ]
        )
        rest = iter(outputs[found.n_outputs :])
        for index in found.updated:
            variables[index].assign(next(rest))
        for _ in range(found.n_losses):
            self.add_loss(next(rest))
        for index in found.masked:
            outputs[index]._keras_mask = next(rest)
        return keras.tree.pack_sequence_as(found.structure, outputs[: found.n_outputs])

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration. Raises `UnsupportedError` for overrides that are not a dict of strings."""
        options = self._remote.options
        return {
            "name": self.name,
            "trainable": self.trainable,
            "part": keras.saving.serialize_keras_object(self.part),
            "client": self._remote.target,
            "overrides": _plain(options.overrides),
            "params": None
            if options.params is None
            else {label: dict(given) for label, given in options.params.items()},
            "no_gradient": options.no_gradient,
            "timeout": options.timeout,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RemoteLayer:
        """Makes the layer of a configuration; it connects without credentials at its first call."""
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
    """Holds a layer's client and traced parts."""

    def __init__(self, options: RemoteOptions, client: Client | str) -> None:
        self.options = options
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
        """Returns the traced part for inputs of this structure and these types, in this mode."""
        specs = [_spec(tensor) for tensor in tensors]
        mask_specs = [None if mask is None else _spec(mask) for mask in masks]
        structure = keras.tree.map_structure(lambda _: 0, inputs)
        frozen = tuple(layer.trainable for layer in part._flatten_layers())
        key = (repr(structure), tuple(specs), tuple(mask_specs), frozen, training)
        found = self._parts.get(key)
        if found is None:
            _refuse_remote_layers(part)
            of_mode = traced(part, structure, specs, mask_specs, training)
            found = self._parts[key] = RemotePart.create(of_mode, self.options)
        return found

    def release(self) -> None:
        for part in self._parts.values():
            part.release()


def _refuse_remote_layers(part: Any) -> None:
    """Raises `UnsupportedError` if a part contains a remote layer."""
    for layer in part._flatten_layers():
        if isinstance(layer, RemoteLayer):
            raise UnsupportedError(
                f"the part {part.name!r} contains the RemoteLayer {layer.name!r}, but a server cannot call layers of "
                "this process. Use the inner layer's `part` instead of the layer, and give its overrides to the outer "
                "RemoteLayer; or split the part, so that the two RemoteLayers follow each other"
            )


def _spec(tensor: Any) -> tuple[str, tuple[int | None, ...] | None]:
    """Returns dtype and shape; the batch size is None, so that all batch sizes share one traced part."""
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
