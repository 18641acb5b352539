"""Eight CPU devices with threads to spare, strict dtypes, and no accelerator looked for."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no cloud metadata server to ask
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # libtpu's lock file lets one process at a time in
os.environ.setdefault("TPU_LOG_DIR", "disabled")
# jaxlib 0.10.2 factorizes a batch of matrices in the pool of threads that it blocks one of: with no
# more threads than devices, all devices may wait for each other.
os.environ.setdefault("NPROC", "16")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
