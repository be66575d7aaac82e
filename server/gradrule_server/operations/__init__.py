"""Makes a server observable: metrics, traces, logs, the audit log, its status.

`request_record` records what happens in a request, and passes the record of an ended request to the sinks that count,
log or export it; `operations` creates and runs them all. Nothing here imports grpc or TensorFlow.
"""
