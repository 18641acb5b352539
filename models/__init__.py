"""Model families as their papers have them: plain arrays in, plain arrays out.

Each module gives the same five names:

- `SIZES`: name -> frozen dataclass of sizes; `"tiny"` runs on a laptop's CPU in milliseconds.
- `train_step(state, batch) -> (state, loss)`, or `serve_step`: a pure function of pytrees, which
  finds the sizes in its arguments.
- `donate_argnums`: the arguments whose buffers the step may reuse.
- `init(size, seed)`: real arguments of the step.
- `example_arguments(size)`: the same as `jax.ShapeDtypeStruct` trees; nothing is allocated.
"""
