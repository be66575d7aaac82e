"""TensorFlow's own gRPC server, `tf.distribute.Server`: prints its port and serves until killed."""

from __future__ import annotations

import tensorflow as tf

if __name__ == "__main__":
    server = tf.distribute.Server.create_local_server()
    print(str(server.target).rpartition(":")[2], flush=True)
    server.join()
