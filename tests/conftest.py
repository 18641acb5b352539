"""Eight CPU devices, strict dtype promotion, and no accelerator looked for."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no cloud metadata server to ask
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # libtpu's lock file lets one process at a time in
os.environ.setdefault("TPU_LOG_DIR", "disabled")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
