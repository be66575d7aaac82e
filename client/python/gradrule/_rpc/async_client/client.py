"""Defines the client, and the functions that make one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._messages.call_arguments import NoGradient
from gradrule._messages.session_calls import SessionOptions
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._progress import Progress
from gradrule._rpc import call_routes, channels, process_forks
from gradrule._rpc.async_client.evaluation import AsyncEvaluationMethods
from gradrule._rpc.async_client.programs import AsyncProgramMethods
from gradrule._rpc.async_client.rules import AsyncRuleMethods
from gradrule._rpc.async_client.sessions import AsyncSession
from gradrule._rpc.async_client.sweeps import AsyncSweepMethods
from gradrule._rpc.async_transport import Starting, run_in_thread, starting
from gradrule._rpc.local_server import LocalServer
from gradrule.errors import UnsupportedError


def connect(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
    timeout: float = 30.0,
    compile_timeout: float = 300.0,
    insecure_token: bool = False,
    stream: bool = True,
    transfer: Transfer = PLAIN,
    shared_memory: bool = True,
) -> AsyncClient:
    """Returns a client of a server. Sends nothing yet.

    Args:
        target: `host:port`; without a port, 8470. Or a URL (`https://` means TLS), or a target with a scheme of gRPC,
            such as `unix:`. Several servers that share a registry: a name with all of their addresses, or
            `ipv4:10.0.0.1:8470,10.0.0.2:8470`.
        credentials: What `gradrule.tls` returns, or channel credentials of gRPC; None: the connection is not encrypted.
        token: Sent as a bearer token with each call.
        timeout: Default timeout of calls, in seconds.
        compile_timeout: Additional seconds for compiling a program, in calls that have no timeout of their own. The
            run of a compiled program still gets `timeout` seconds, but its first run may use this time too.
        insecure_token: Allow to send the token to another machine without encryption.
        stream: Send repeated calls of programs over one persistent stream, which makes each call faster. The stream
            goes to one server; another replaces it if that server goes away. Must be False if the calls of this client
            should use several servers, or if a proxy distributes them.
        transfer: How tensors are transferred; default: unchanged.
        shared_memory: Put large tensors of programs' calls into memory that is shared with the server, if that runs on
            the same host and allows it, and `transfer` does not pack tensors.

    Raises:
        InvalidParamError: The target is not valid, `timeout` is not positive, `compile_timeout` is negative, or the
            token would be sent without encryption.
        UnsupportedError: This process was forked from one with a client, and gRPC's support for forks is off.
    """
    return open_client(
        channels.OPTIONS,
        target,
        credentials,
        token=token,
        timeout=timeout,
        compile_timeout=compile_timeout,
        insecure_token=insecure_token,
        stream=stream,
        transfer=transfer,
        shared_memory=shared_memory,
    )


def open_client(
    channel_options: Sequence[tuple[str, Any]],
    target: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    token: str | None,
    timeout: float,
    compile_timeout: float,
    insecure_token: bool,
    stream: bool = True,
    transfer: Transfer = PLAIN,
    shared_memory: bool = True,
) -> AsyncClient:
    """Returns a client whose channel has these options of gRPC. Other arguments and errors are those of `connect`."""
    timeout = call_routes.checked_timeout(timeout)
    compile_timeout = call_routes.checked_compile_timeout(compile_timeout)
    target, credentials = channels.endpoint(target, credentials)
    process_forks.note_connection()
    channels.check_token(target, token, is_encrypted=credentials is not None, insecure_token=insecure_token)
    address, compression = channels.address(target), transfer.grpc_compression
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=channel_options, compression=compression)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=channel_options, compression=compression)
    options: dict[str, Any] = {
        "token": token,
        "timeout": timeout,
        "compile_timeout": compile_timeout,
        "stream": stream,
        "transfer": transfer,
        "shared_memory": shared_memory,
    }
    client = AsyncClient(channel, target, **options)
    if credentials is None:
        client._reconnect = functools.partial(connect, target, insecure_token=insecure_token, **options)
    return client


def local(**settings: Any) -> Starting[AsyncClient]:
    """Starts a server in a separate process: `client = await gr.aio.local()`, or `async with gr.aio.local() as client`.

    The server stops, and its temporary folder is removed, when the client is closed, at the end of the block, or when
    this process ends in any way, even by SIGKILL. It stops too when nothing refers to the client any more.
    Needs the extra `gradrule[server]` or `gradrule[gpu]`.

    Args:
        **settings: Flags of `gradrule serve`: `device="cpu"` for `--device cpu`. By default the server listens on a
            free port and stores its data in a temporary folder.

    Returns:
        A client of the server.

    Raises:
        InvalidParamError: The server refuses a setting.
        UnavailableError: The server does not start for another reason.
    """
    return starting(functools.partial(_start_local, settings))


async def _start_local(settings: Mapping[str, Any]) -> AsyncClient:
    server = LocalServer(settings)
    try:
        client = connect(await run_in_thread(server.start))
    except BaseException:
        # A cancelled task leaves the thread that starts the server.
        await run_in_thread(server.stop)
        raise
    # At the latest when the interpreter ends.
    client._stop_server = weakref.finalize(client, server.stop)
    return client


class AsyncClient(AsyncRuleMethods, AsyncEvaluationMethods, AsyncSweepMethods, AsyncProgramMethods):
    """Sends calls to a server. Made by `connect` or `local`; close it, or use it in an `async with` block.

    Safe to share between tasks. Every call has a deadline: its `timeout` in seconds, or that of `connect`, and
    time for compiling. Every failure is a `GradruleError`. A pickled client, or program of one, connects again where it
    is loaded; the pickle contains the token.
    """

    _reconnect: functools.partial[AsyncClient] | None = None

    def __reduce__(self) -> tuple[Callable[[], AsyncClient], tuple[()]]:
        if self._reconnect is None:
            raise UnsupportedError(
                "a client with credentials cannot be pickled, because they may hold a private key; "
                "connect in the other process"
            )
        return self._reconnect, ()

    def session(
        self,
        graph: GraphLike,
        *,
        variables: Mapping[str, Any] | None = None,
        overrides: Overrides | None = None,
        no_gradient: NoGradient = "error",
        progress: Progress = None,
    ) -> AsyncSession:
        """Returns a session: `async with client.session(graph) as s`, then `await s.step(…)`.

        Args:
            graph: As in `evaluate`.
            variables: First values of variables by name; default: those of `graph.variables`, then those that the
                graph's initializers compute.
            overrides: As in `evaluate`; used wherever the session differentiates.
            no_gradient: As in `evaluate`.
            progress: A function that gets a `gr.ProgressReport` with the loss after each step; True: a bar, if standard
                error is a terminal or this is a notebook.

        Raises:
            GradruleError: At the start of the block: as in `evaluate`, or `QuotaExceededError`.
        """
        return AsyncSession(self, SessionOptions(graph, overrides, variables, no_gradient, self._transfer, progress))
