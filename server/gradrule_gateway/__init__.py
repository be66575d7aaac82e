"""Serves the gRPC API of a gradrule server over HTTP and JSON, as a plain client of its gRPC port."""
