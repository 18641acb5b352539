"""Asks Shardy, the partitioner that JAX compiles with, for the rules of equations.

All equations are lowered together to one StableHLO function; Shardy's pass puts a rule on each op,
and the rules of the ops that one equation became are composed into one.

This module reaches into JAX's private parts, its MLIR bindings.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from autoshard.compose import ArrayNodes, Composition, Limit, OpFactors
from autoshard.factors import Rule

# A wrong nesting aborts the process, so this text is a constant and tested.
_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
# The TPU lowering hides least behind library calls; what TPUs lack is lowered for the CPU.
_PLATFORMS = ("tpu", "cpu")
_RETURNS = ("func.return", "stablehlo.return")
_COMBINERS = {
    "stablehlo.add": "add",
    "stablehlo.multiply": "mul",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}


def source_line(eqn: JaxprEqn) -> str:
    """Returns `file.py:12 (function)`, the user's line that made an equation."""
    text = source_info_util.summarize(eqn.source_info)
    return re.sub(r":(\d+):\d+ ", r":\1 ", text.rpartition("/")[2]) or "an unknown line"


def lowered_rules(eqns: Sequence[JaxprEqn], platform: str = _PLATFORMS[0]) -> list[Rule | None]:
    """Returns each equation's rule, None if it does not lower or holds an op without a rule."""
    if not eqns:
        return []
    try:
        module = _lower(eqns, platform)
    except Exception:  # whatever a primitive raises when bound on its own: it has no rule
        if len(eqns) == 1:
            return [None] if platform == _PLATFORMS[-1] else lowered_rules(eqns, _PLATFORMS[-1])
        half = len(eqns) // 2
        return lowered_rules(eqns[:half], platform) + lowered_rules(eqns[half:], platform)
    with module.context:
        PassManager.parse(_PIPELINE).run(module.operation)
        return _read_module(module, eqns)


def _lower(eqns: Sequence[JaxprEqn], platform: str) -> ir.Module:
    """Lowers equations side by side: all their operands in, all their results out."""

    def program(*args):
        results, rest = [], list(args)
        for eqn in eqns:
            operands, rest = rest[: len(eqn.invars)], rest[len(eqn.invars) :]
            with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
                out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            results.extend(out if eqn.primitive.multiple_results else [out])
        return results

    avals: list[Any] = [v.aval for eqn in eqns for v in eqn.invars]
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in avals
    ]
    with _neutral_context(eqns):
        traced = jax.jit(program, keep_unused=True).trace(*avals)
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    return cast(ir.Module, module)


@contextlib.contextmanager
def _neutral_context(eqns: Sequence[JaxprEqn]) -> Iterator[None]:
    """Keeps the caller's settings from changing how an equation lowers."""
    wide = any(_is_wide(v.aval) for eqn in eqns for v in (*eqn.invars, *eqn.outvars))
    with jax.enable_x64(wide), jax.numpy_dtype_promotion("standard"):
        yield


def _rank(aval) -> int:
    return len(aval.shape)


def _is_wide(aval) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    part = 2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    return dtype.itemsize // part == 8 and dtype.kind in "iufc"


def _read_module(module: ir.Module, eqns: Sequence[JaxprEqn]) -> list[Rule | None]:
    reader = _Reader(module)
    main = reader.functions["main"]
    arguments = [reader.composition.new_array(_shape(a)) for a in main.arguments]
    results = reader.call(main, arguments)
    rules: list[Rule | None] = []
    first_in = first_out = 0
    for eqn in eqns:
        ins = arguments[first_in : first_in + len(eqn.invars)]
        outs = results[first_out : first_out + len(eqn.outvars)]
        first_in, first_out = first_in + len(ins), first_out + len(outs)
        ins = reader.own_dims(ins, [_rank(v.aval) for v in eqn.invars])
        outs = reader.own_dims(outs, [_rank(v.aval) for v in eqn.outvars])
        unknown = reader.composition.is_unknown((*ins, *outs))
        rules.append(None if unknown else reader.composition.rule(ins, outs))
    return rules


class _Reader:
    """Walks the ops of a module and composes their rules."""

    def __init__(self, module: ir.Module):
        self.composition = Composition()
        self.functions = {
            ir.StringAttr(f.attributes["sym_name"]).value: f.regions[0].blocks[0]
            for f in module.body.operations
            if f.operation.name == "func.func" and len(f.regions[0].blocks)
        }

    def own_dims(self, arrays: list[ArrayNodes], ranks: list[int]) -> list[ArrayNodes]:
        """Drops the dims of key data, which a PRNG key array is lowered with behind its own."""
        for dims, rank in zip(arrays, ranks, strict=True):
            self.composition.restrict([dims[rank:]], Limit.REPLICATE)
        return [dims[:rank] for dims, rank in zip(arrays, ranks, strict=True)]

    def call(self, block: ir.Block, operands: Sequence[ArrayNodes]) -> list[ArrayNodes]:
        return self._block(block, operands, {})

    def _block(self, block, operands, outer: dict) -> list[ArrayNodes]:
        values = dict(outer)
        values.update(zip(block.arguments, operands, strict=True))
        for view in block.operations:
            op = view.operation
            ins = [values[v] for v in op.operands]
            if op.name in _RETURNS:
                return ins
            outs = self._op(op, ins, values)
            values.update(zip(op.results, outs, strict=True))
        return []

    def _op(self, op: ir.Operation, ins: list[ArrayNodes], values: dict) -> list[ArrayNodes]:
        attributes = op.attributes
        if "sdy.sharding_rule" in attributes:
            factors = _op_factors(op, sdy.OpShardingRuleAttr(attributes["sdy.sharding_rule"]))
            shapes = [_shape(v) for v in op.operands], [_shape(v) for v in op.results]
            return self.composition.apply(factors, ins, *shapes)
        for name in ("callee", "decomposition"):
            if name in attributes and op.name in ("func.call", "stablehlo.composite"):
                callee = ir.FlatSymbolRefAttr(attributes[name]).value
                return self.call(self.functions[callee], ins)
        if op.name == "stablehlo.while":
            return self._while(op, ins, values)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return self._branches(op, values)
        if op.name in ("stablehlo.constant", "stablehlo.iota"):
            return [self.composition.new_array(_shape(v)) for v in op.results]
        if op.name.startswith("chlo.") and _same_shapes(op):
            return self._pointwise(ins)
        self.composition.restrict(ins, Limit.UNKNOWN)
        return [self.composition.new_array(_shape(v), Limit.UNKNOWN) for v in op.results]

    def _while(self, op, ins, values) -> list[ArrayNodes]:
        cond, body = (region.blocks[0] for region in op.regions)
        self._block(cond, ins, values)
        for carried, out in zip(ins, self._block(body, ins, values), strict=True):
            self.composition.unify(carried, out)
        return ins

    def _branches(self, op, values) -> list[ArrayNodes]:
        first, *others = (self._block(r.blocks[0], [], values) for r in op.regions)
        for branch in others:
            for a, b in zip(first, branch, strict=True):
                self.composition.unify(a, b)
        return first

    def _pointwise(self, ins: list[ArrayNodes]) -> list[ArrayNodes]:
        for other in ins[1:]:
            self.composition.unify(ins[0], other)
        return [ins[0]]


def _op_factors(op: ir.Operation, rule: sdy.OpShardingRuleAttr) -> OpFactors:
    sizes = list(rule.factor_sizes)
    limits = [Limit.NONE] * len(sizes)
    reductions: list[str | None] = [None] * len(sizes)
    for f in rule.permutation_factors:
        limits[f] = Limit.PERMUTE
    for f in rule.need_replication_factors:
        limits[f] = Limit.REPLICATE
    reducing = list(rule.reduction_factors)
    combiner = _combiner(op) if reducing else None
    for f in reducing:
        reductions[f] = combiner
        if combiner is None:
            limits[f] = Limit.REPLICATE
    return OpFactors(
        _mappings(rule.operand_mappings), _mappings(rule.result_mappings), sizes, limits, reductions
    )


def _mappings(arrays) -> list[list[list[int]]]:
    return [
        [list(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(a).dim_mappings]
        for a in arrays
    ]


def _combiner(op: ir.Operation) -> str | None:
    """Names what an op combines partial results with: its region's one op.

    None if no all-reduce computes it. Several arrays reduced together (argmax) can combine as they
    like: their partial results are gathered.
    """
    if not len(op.regions):
        return "add"  # contractions, and gathers that mask what another device holds
    names = [inner.operation.name for inner in op.regions[-1].blocks[0].operations][:-1]
    if len(names) == 1:
        return _COMBINERS.get(names[0])
    return "gather" if op.name == "stablehlo.reduce" and len(op.results) > 1 else None


def _same_shapes(op: ir.Operation) -> bool:
    shapes = {tuple(_shape(v)) for v in (*op.operands, *op.results)}
    return len(shapes) == 1 and len(op.results) == 1


def _shape(value: ir.Value) -> list[int]:
    if not isinstance(value.type, ir.RankedTensorType):
        return []
    return list(ir.RankedTensorType(value.type).shape)
