"""Holds what client and server share: element types, op definitions, tensors, the wire format. Internal; no gRPC."""
