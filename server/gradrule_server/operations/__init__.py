"""What people who run a server see of it: metrics, traces, logs, the audit log, its status.

`request` notes what is known of the request under way; `observer` hands it, once it has ended, to those who count, log
or export it; `operations` puts them together. Nothing here imports grpc or TensorFlow.
"""
