"""Holds what client and server share: element types, op definitions, tensors, and the wire format. No gRPC here."""
