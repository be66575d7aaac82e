"""Lists the HTTP routes of all unary RPCs. One handler serves them all.

The module imports only the standard library, because `tools/generate_openapi.py` reads the table too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PACKAGE = "gradrule.v1"


@dataclass(frozen=True, slots=True)
class Route:
    """One RPC's route.

    Attributes:
        method: HTTP method.
        path: Path; `{field}` fills a field of the request and may contain slashes.
        rpc: `Service/Method` in the package `gradrule.v1`.
        prefix: Text before the value of `{field}`, the name of its collection.
        body: `json`: the request message as JSON; `bytes`: raw bytes, streamed to a client-streaming RPC; `none`: query
            parameters fill the fields.
        may_compile: True if the server may compile a program, so that the default deadline is longer.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    rpc: str
    prefix: str = ""
    body: Literal["json", "bytes", "none"] = "none"
    may_compile: bool = False

    @property
    def grpc_path(self) -> str:
        """Path of the method in gRPC."""
        return f"/{PACKAGE}.{self.rpc}"

    @property
    def path_field(self) -> str:
        """Name of the field that the path fills; empty if there is none."""
        return self.path.partition("{")[2].rstrip("}")


ROUTES = (
    Route("GET", "/v1/rules", "RuleService/ListRules"),
    Route("POST", "/v1/rules", "RuleService/CreateRule", body="json"),
    Route("POST", "/v1/rules:sample", "RuleService/SampleRule", body="json"),
    Route("GET", "/v1/rules/{name}", "RuleService/GetRule"),
    Route("DELETE", "/v1/rules/{name}", "RuleService/DeleteRule"),
    Route("GET", "/v1/presets", "RuleService/ListPresets"),
    Route("GET", "/v1/programs", "ProgramService/ListPrograms"),
    Route("POST", "/v1/programs", "ProgramService/CompileProgram", body="json", may_compile=True),
    Route("GET", "/v1/programs/{name}", "ProgramService/GetProgram", prefix="programs/"),
    Route("DELETE", "/v1/programs/{name}", "ProgramService/DeleteProgram", prefix="programs/"),
    Route("POST", "/v1/graphs:describe", "ProgramService/DescribeGraph", body="json", may_compile=True),
    Route("POST", "/v1/evaluate", "GradientService/Evaluate", body="json", may_compile=True),
    Route("GET", "/v1/status", "AdminService/GetServerStatus"),
    Route("POST", "/v1/blobs:findMissing", "BlobService/FindMissingBlobs", body="json"),
    Route("PUT", "/v1/blobs/{sha256}", "BlobService/UploadBlob", body="bytes"),
)

WITHOUT_ROUTE = {
    "GradientService/StreamEvaluate": "a stream in both directions",
    "GradientService/ShareMemory": "for processes on the server's machine, which pass memory over a socket",
    "SessionService/RunSession": "a stream in both directions",
}
"""RPCs that only gRPC has, with the reason."""
