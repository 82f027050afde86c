"""The kernel of almost every operator: finds the plan of the call's signature, records the instruction, makes the results.

This is the hot path, about 5 us per call. The time of every look-up was measured, so measure again after a change.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from wooly_wis.determinism import SENSITIVE
from wooly_wis.dtypes import BY_LABEL
from wooly_wis.flags import followed

from wooly import native, storage
from wooly.determinism import Determinism, Mode
from wooly.devices import NAME, Devices, mixed_devices
from wooly.dtypes import TORCH_DTYPES
from wooly.errors import RemoteOperationError
from wooly.flags import Flags
from wooly.interned_forms import Forms
from wooly.kernels import widening
from wooly.kernels.alerts import ALERTS
from wooly.kernels.device_numbers import DeviceNumber, takes_device_number, tensor_of, with_numbers
from wooly.kernels.forms import is_python_number
from wooly.kernels.host_copies import REAL, tensor_on
from wooly.kernels.host_values import HostValues, wait_as_cuda
from wooly.kernels.inference import Inferences
from wooly.kernels.limits import unusual
from wooly.kernels.outs import RESIZE_SILENTLY, RESIZED_ON_HOST, ResizeOutError
from wooly.kernels.overlap import refuse_resize
from wooly.kernels.plan import CallPlan, PlanBuilder, PlannedCall
from wooly.kernels.promotion import without_default_dtype
from wooly.kernels.schema import PASSING_UNDEFINED, Call, Kernel, OpFacts, tensors_of
from wooly.origins import origin
from wooly.recorder import Recorder
from wooly.rng import Generator, replayed_pair, sequence_of
from wooly.storage import DEVICE_MASK, ID_SHIFT, OFFSET_MASK, PLACE_MASK, Layout
from wooly.sync_debug import sync_debug
from wooly.torch_private import OpOverload, raw_device, redispatch_cpu, tree_map, warn_of_resize

_NUMBERS = (float, int, bool, complex)
#: Largest integer that can be a param.
_MAX_INT = (1 << 63) - 1
#: Maximum number of cached plans of all operators; a full cache is cleared.
_MAX_PLANS = 65536
#: The mode of determinism at the start of a script.
_OFF = Mode()
_learn = None if native.module is None else native.module.learn


class _WideIntegerError(OverflowError):
    """An integer argument does not fit into a signed 64-bit param."""


class _HostTensorError(Exception):
    """Internal signal: an operand is a host tensor that is not a scalar."""


class Generic:
    """Makes the kernels of operators for all devices. A call's signature contains the device, so its plan has one recorder."""

    def __init__(
        self, devices: Devices, forms: Forms, determinism: Determinism, flags: Flags, host_values: HostValues
    ) -> None:
        self._devices = devices
        self._host_values = host_values
        self._determinism, self._flags = determinism, flags
        self._builder = PlanBuilder(forms, determinism)
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        #: Planned calls by signature without offsets, from which calls with other offsets are planned (`x[0]`, `x[1]`, ...).
        self._planned_elsewhere: dict[tuple[Any, ...], PlannedCall] = {}
        #: For signatures whose `out=` tensors must be resized first: the new sizes and strides.
        self._out_sizes: dict[tuple[Any, ...], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        #: The plans and the sizes of `out=` tensors for each default dtype that was used before, except the present one.
        self._kept_plans: dict[
            torch.dtype,
            tuple[
                dict[tuple[Any, ...], CallPlan],
                dict[tuple[Any, ...], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]],
            ],
        ] = {}
        #: Calls with operands in one buffer that were checked: number of the form, and for each operand the first in its buffer.
        self._share_memory: set[tuple[int, ...]] = set()
        #: Facts of the operators whose kernel is `kernel` without special arguments.
        self.facts: dict[OpOverload, OpFacts] = {}
        #: Resizes an `out=` tensor to sizes and strides. `RegisteredDevice` sets it to `Transfer.resize`.
        self.resize: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], None] | None = None

    @property
    def inferences(self) -> Inferences:
        """Counters of inferred signatures."""
        return self._builder.inferences

    def _follow(
        self, op: OpOverload, head: Any, kept: tuple[str, ...] | None, tell: Callable[[Any, tuple[str, ...]], None]
    ) -> None:
        """Tell a kernel the head of its signatures and its flags, now and after each change.

        So the calls of a kernel have one plan per mode of determinism and per set of flags, and a call asks for neither.

        Args:
            op: the operator.
            head: the head of the signatures while the script departs from no default that the operator follows.
            kept: flags that the kernel keeps; None: it follows those of the process.
            tell: called with the head and the flags.
        """
        name = op.overloadpacket.__name__
        depends = name in SENSITIVE or name in ALERTS
        follows = followed(str(op))

        def look() -> None:
            mode = self._determinism.mode if depends else _OFF
            asked = tuple([f for f in self._flags.current if f in follows]) if kept is None else kept
            tell((head, mode, asked) if asked or mode != _OFF else head, asked)
            native.forget()

        if depends:
            self._determinism.watch(lambda mode: look())
        if follows and kept is None:
            self._flags.watch(look)
        look()

    def kernel(
        self,
        op: OpOverload,
        views: tuple[Any, ...] = (),
        flags: tuple[str, ...] | None = None,
        teaches: OpOverload | None = None,
    ) -> Kernel:
        """Make the kernel of one operator overload.

        Args:
            op: the overload.
            views: per argument, whether it is a conjugate view and a negative view that the executor reads as such. It becomes
                part of every signature.
            flags: flags that the kernel keeps; None: it follows those of the process.
            teaches: the operator with the same arguments and results whose calls this kernel records; None: `op`.
        """
        head: Any = op
        asked: tuple[str, ...] = ()

        def follow(new_head: Any, new_flags: tuple[str, ...]) -> None:
            nonlocal head, asked
            head, asked = new_head, new_flags

        self._follow(op, (op, views) if views else op, flags, follow)
        facts = OpFacts(op)
        taught = facts.name if teaches is None else str(teaches)
        if not views and flags is None:
            self.facts[op] = facts
        plans, devices = self._plans, self._devices
        scalar_at = facts.scalar
        scalar_kw = facts.scalar_kw
        mutable = facts.mutable
        collect = _collect
        finish = self._finish
        wrote = _wrote_list if facts.each_alone else written_result
        n_scalar = len(scalar_at)

        def run(*args: Any, drawn_from: Generator | None = None, **kwargs: Any) -> Any:
            key: list[Any] = [head]
            buffers: list[int] = []
            params: list[Any] = []
            try:
                for i, a in enumerate(args):
                    if isinstance(a, Tensor):
                        if a.is_cpu:
                            collect(a, False, key, buffers, params)
                        else:
                            at = a.data_ptr() or storage.address_of(a)
                            key += (a.dtype, a.shape, a.stride(), at & PLACE_MASK)
                            buffers.append(at >> ID_SHIFT)
                    elif i < n_scalar and scalar_at[i]:
                        collect(a, True, key, buffers, params)
                    elif a.__class__ is list:
                        collect(a, False, key, buffers, params)
                    else:
                        key.append(a)
                if kwargs:
                    for name, a in kwargs.items():
                        key.append(name)
                        collect(a, name in scalar_kw, key, buffers, params)
            except _HostTensorError:
                if facts.each_alone:
                    return redispatch_cpu(op)(*args, **kwargs)
                raise mixed_devices(tensors_of(Call(args, kwargs))) from None
            except _WideIntegerError:
                if facts.name != "aten.fill_.Scalar" or args[0].dtype is not torch.uint64:
                    raise
                return run(args[0], args[1] - (1 << 64))  # params are signed: the same 64 bits
            doubtful = unusual(key, params) if params else ()
            if doubtful:
                key.append(doubtful)
            if not buffers:
                key.append(devices.current)
            signature = tuple(key)
            plan = plans.get(signature)
            if plan is not None:
                if _learn is not None and not plan.random and (plan.apart or not plan.special):
                    known = plan.recorder, plan.form, plan.outs, plan.written, buffers, params
                    _learn(taught, *known, False, plan.apart)
            else:
                again = partial(run, drawn_from=drawn_from)
                found = self._first(facts, again, signature, buffers, Call(args, kwargs), asked, doubtful)
                if not isinstance(found, CallPlan):
                    return found()
                plan = found
            recorder = plan.recorder
            with recorder.lock:
                try:
                    heap = recorder.heap
                    if heap.dead:
                        recorder.release_dead()
                    recorder.operations += 1
                    where = origin()
                    if plan.random:
                        if drawn_from is not None:
                            recorder.note_draw(drawn_from)
                        params += (drawn_from or recorder.generator).draw()
                    if params:
                        recorder.params += params
                    if plan.special or (mutable and plan.outs):
                        result = finish(facts, plan, buffers, where, args, kwargs)
                    elif mutable:
                        link = recorder.link
                        if link is not None and link.mirroring:
                            for w in plan.written:
                                link.overwrite(buffers[w], len(recorder.origins))
                        recorder.emit(plan.form, buffers, where)
                        result = wrote(facts, args, kwargs)
                    else:
                        result = []
                        for out in plan.outs:
                            if out is None:
                                result.append(None)
                                continue
                            t, buffer = out[0].new(heap)
                            recorder.emit_new(out[1], buffer, where)
                            buffers.append(buffer)
                            result.append(t)
                        recorder.emit(plan.form, buffers, where)
                        if not facts.list_return:
                            result = result[0] if len(result) == 1 else tuple(result)
                    if len(recorder.origins) >= recorder.room:
                        recorder.close_if_due(plan.form)
                    return result
                except BaseException:
                    recorder.drop_incomplete()
                    raise

        return _given_generator(run, facts.generator) if facts.generator is not None else run

    def forget_plans(self) -> None:
        """Clear the cache of the present default dtype's plans, because it is full."""
        self._plans.clear()
        self._planned_elsewhere.clear()
        self._out_sizes.clear()
        native.forget()

    def change_plans(self, before: torch.dtype, now: torch.dtype) -> None:
        """Exchange the cached plans for those of another default dtype: dtypes of results may depend on it.

        A trainer in float64 or float16 sets the default dtype twice per step, so the plans of the other one are kept.
        """
        self._kept_plans[before] = self._plans.copy(), self._out_sizes.copy()
        plans, out_sizes = self._kept_plans.pop(now, ({}, {}))
        # Kernels hold these dictionaries, so their contents change.
        self._plans.clear()
        self._planned_elsewhere.clear()
        self._out_sizes.clear()
        self._plans.update(plans)
        self._out_sizes.update(out_sizes)
        native.forget()

    def differentiated(self, op: OpOverload) -> Callable[..., list[Tensor]]:
        """Make the kernel of one operator overload for calls with gradients. It records the call as one instruction.

        Returns:
            A function of: args; kwargs; index among the distinct tensors, for each tensor argument; indices of the distinct
            tensors that require a gradient; gradients of the results, to compute the gradients of the arguments, or None to
            compute the results; seed and offset of the random numbers, or None; whether to compute the results without gradients.
        """
        head: Any = op
        asked: tuple[str, ...] = ()

        def follow(new_head: Any, new_flags: tuple[str, ...]) -> None:
            nonlocal head, asked
            head, asked = new_head, new_flags

        self._follow(op, op, None, follow)
        facts = OpFacts(op)
        plans = self._plans

        def run(
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            places: tuple[int, ...],
            wanted: tuple[int, ...],
            grads: tuple[Tensor | None, ...] | None,
            drawn: tuple[int, int] | None,
            no_grad: bool = False,
        ) -> list[Tensor]:
            key: list[Any] = [head, "differentiated", places, wanted, grads is None, no_grad]
            buffers: list[int] = []
            params: list[Any] = []
            try:
                for i, a in enumerate(args):
                    _collect(a, facts.scalar[i], key, buffers, params)
                for name, a in kwargs.items():
                    key.append(name)
                    _collect(a, name in facts.scalar_kw, key, buffers, params)
            except _HostTensorError:
                raise mixed_devices(tensors_of(Call(args, kwargs))) from None
            buffers = [buffers[places.index(k)] for k in range(max(places) + 1)]
            for g in grads or ():
                _collect(g, False, key, buffers, params)
            signature = tuple(key)
            plan = plans.get(signature)
            if plan is None:
                call = Call(args, kwargs)
                on = self._recorder_of(buffers, call)
                plan, alerts = self._builder.differentiated(facts, call, on, places, wanted, grads, asked, no_grad)
                if not alerts:
                    plans[signature] = plan
            recorder = plan.recorder
            with recorder.lock:
                if recorder.heap.dead:
                    recorder.release_dead()
                recorder.operations += 1
                where = origin()
                recorder.params += params
                if plan.random:
                    assert drawn is not None
                    recorder.params += drawn if recorder.capture is not None else replayed_pair(drawn)
                results = []
                for out in plan.outs:
                    assert out is not None
                    t, buffer = out[0].new(recorder.heap)
                    recorder.emit(out[1], [buffer], where)
                    buffers.append(buffer)
                    results.append(t)
                recorder.emit(plan.form, buffers, where)
                if len(recorder.origins) >= recorder.room:
                    recorder.close_if_due(plan.form)
                return results

        return run

    def _first(
        self,
        facts: OpFacts,
        run: Kernel,
        signature: tuple[Any, ...],
        buffers: list[int],
        call: Call,
        flags: tuple[str, ...],
        doubtful: tuple[int, ...],
    ) -> CallPlan | Callable[[], Any]:
        """The plan of a call whose signature is new.

        Args:
            facts: the operator.
            run: its kernel.
            signature, buffers, call: the call.
            flags: flags that the call asks for.
            doubtful: what `limits.unusual` says of the numbers.

        Returns:
            Or a function that gives the results, if the call must be computed in another way.
        """
        if native.module is not None:
            native.module.disarm()
        if DeviceNumber in signature:
            if not (takes_device_number(facts.name, call.args) and _on_one_device(buffers)):
                return _later(run, with_numbers(call, float))
            call = with_numbers(call, DeviceNumber)
        if facts.mutable and facts.name not in RESIZED_ON_HOST:
            wrong = self._out_sizes.get(signature)
            if wrong is not None:
                self._resize_outs(facts, call, wrong, warn=True)
                return _later(run, call)
        if facts.each_alone and not (_on_one_device(buffers) and _lists_on_device(call.args)):
            return _later(redispatch_cpu(facts.op), call)
        if facts.name in PASSING_UNDEFINED and call.args[0] is None:
            return lambda: (None,) * facts.n_returns
        gaps = widening.gaps_of(facts.op)
        narrow = widening.gap_of(gaps, call) if gaps else None
        if narrow is not None and self._recorder_of(buffers, call).on_cpu():
            return partial(widening.compute_wider, facts, narrow, call)
        try:
            planned = self._plan(facts, signature, buffers, call, flags, doubtful)
        except RuntimeError:
            if not (facts.each_alone and facts.mutable and not facts.out_args):
                raise
            return _later(redispatch_cpu(facts.op), call)  # a tensor is wrong: as on CUDA, those before it are written
        if isinstance(planned, Call):
            return _later(run, planned)
        if planned.doubt is not None:
            return partial(self._confirm, facts, run, planned, signature, call.args, call.kwargs)
        return planned.plan

    def _plan(
        self,
        facts: OpFacts,
        signature: tuple[Any, ...],
        buffers: list[int],
        call: Call,
        flags: tuple[str, ...],
        doubtful: tuple[int, ...],
    ) -> PlannedCall | Call:
        """Plan a call, and cache its plan.

        Returns:
            A call that must run instead: the same one, if an `out=` tensor was resized, so that it has another signature now;
            one that does not depend on the default dtype; or one whose condition is on the device.
        """
        # A condition on the host is no operand of the arithmetic, so it must keep its dtype.
        if facts.op.overloadpacket is torch.ops.aten.where and call.args[0].is_cpu:
            condition = call.args[0].to(torch.device(NAME, self._recorder_of(buffers, call).heap.index))
            return Call((condition, *call.args[1:]), call.kwargs)
        elsewhere, offsets = _without_offsets(signature)
        known = self._planned_elsewhere.get(elsewhere)
        if known is not None:
            planned = self._builder.moved(facts, known, offsets)
            self._keep_plan(signature, planned)
            return planned
        try:
            planned = self._builder.build(facts, call, self._recorder_of(buffers, call), flags, doubtful)
        except ResizeOutError as e:
            self._out_sizes[signature] = e.sizes
            self._resize_outs(facts, call, e.sizes, warn=False)  # inference has already warned
            return call
        new = [out[0].dtype for out in planned.plan.outs if out is not None]
        other = without_default_dtype(facts, call, new)
        if other is not None:
            return other
        if not planned.alerts or planned.doubt is not None:  # a call that is confirmed runs again, by its plan
            self._keep_plan(signature, planned)
            plan = planned.plan
            depends_on_data = plan.special and not plan.apart
            given = len(planned.form.operands) - sum(out is not None for out in plan.outs)
            if planned.doubt is None and not (depends_on_data or facts.out_args) and given == len(offsets):
                self._planned_elsewhere[elsewhere] = planned
        return planned

    def _keep_plan(self, signature: tuple[Any, ...], planned: PlannedCall) -> None:
        if len(self._plans) + len(self._out_sizes) >= _MAX_PLANS:
            self.forget_plans()
        self._plans[signature] = planned.plan

    def _resize_outs(
        self,
        facts: OpFacts,
        call: Call,
        sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]],
        *,
        warn: bool,
    ) -> None:
        """Give the `out=` tensors of a call the sizes and strides of its results, and warn as ATen does.

        Raises:
            RuntimeError: an `out=` tensor is also an argument of the call.
        """
        assert self.resize is not None
        refuse_resize(facts, call, {name: shape for name, (shape, _) in sizes.items()})
        for name, (shape, strides) in sizes.items():
            if warn and facts.op.overloadpacket.__name__ not in RESIZE_SILENTLY:
                warn_of_resize(call.kwargs[name], shape)
            self.resize(call.kwargs[name], shape, strides)

    def _recorder_of(self, buffers: list[int], call: Call) -> Recorder:
        """The recorder of the device on which a call runs.

        Raises:
            RuntimeError: the operands are on several devices, or on a device of another type.
        """
        if not buffers:
            named = next((a for a in (*call.args, *call.kwargs.values()) if isinstance(a, torch.device)), None)
            return self._devices.recorders[self._devices.index_of(named)]
        if not _on_one_device(buffers):
            raise mixed_devices(tensors_of(call))
        return self._devices.recorders[buffers[0] & DEVICE_MASK]

    def generator_of(self, tensors: Iterable[Tensor]) -> Generator:
        """The generator of the device of the first device tensor; without device tensors, of the current device."""
        return self._recorder_at(tensors).generator

    def on_cpu(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the executor of the device of the first device tensor computes on a CPU."""
        return self._recorder_at(tensors).on_cpu()

    def _recorder_at(self, tensors: Iterable[Tensor]) -> Recorder:
        found = (d.index for d in map(raw_device, tensors) if d.type == NAME)
        return self._devices.recorders[next(found, self._devices.current)]

    def _confirm(
        self,
        facts: OpFacts,
        run: Kernel,
        planned: PlannedCall,
        signature: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call whose trial on the host failed, and wait for the device. The trial used zeros, so the call may succeed.

        While a graph is captured, nothing waits, and an error of the call comes with a replay.

        If a call fails, the executor drops the content of the buffers that the call writes. So a call that writes its arguments
        runs on copies of them first; the arguments keep their content if the call fails. Of the tensors of a list, those before
        the wrong one are written, as on CUDA.
        """
        recorder = planned.plan.recorder
        with recorder.lock:
            try:
                if recorder.capture is not None:
                    # Nothing is computed yet, so the device cannot be asked. The next call with this signature is tried again.
                    result = run(*args, **kwargs)
                    self._plans.pop(signature, None)
                    native.forget()
                    return result
                if facts.mutable and not facts.random:
                    copies = _with_copies(facts, Call(args, kwargs))
                    run(*copies.args, **copies.kwargs)
                    recorder.sync()
                result = run(*args, **kwargs)
                recorder.sync()
                if planned.alerts:  # as the next call must, too
                    self._plans.pop(signature, None)
                    native.forget()
            except Exception as e:
                # Also if the run on copies, which is a call of its own with its own doubt, has raised the doubt.
                self._plans.pop(signature, None)
                native.forget()
                if not isinstance(e, RemoteOperationError):
                    raise
                if facts.each_alone and facts.mutable and not facts.out_args and e.operation == facts.name:
                    return redispatch_cpu(facts.op)(*args, **kwargs)
                if planned.doubt is not None and str(planned.doubt) in str(e):
                    raise planned.doubt from None
                if "not implemented for" in e.message:  # the kernel does not support the dtype
                    raise NotImplementedError(e.message) from None
                raise
            return result

    def _finish(
        self,
        facts: OpFacts,
        plan: CallPlan,
        buffers: list[int],
        where: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record the rare calls.

        These are results whose shape depends on data, operators that write an argument and make tensors, and operands that would
        overlap in one buffer.

        Raises:
            RuntimeError: the operator writes to memory that it also reads.
        """
        recorder = plan.recorder
        if any(buffers[a] == buffers[b] for a, b in plan.apart):
            self._refuse_shared_memory(facts, plan, buffers, Call(args, kwargs))
        link = recorder.link
        if link is not None:
            for w in plan.written:
                link.forget(buffers[w])
        fresh: list[Tensor | None] = []
        if plan.apart and not plan.outs:
            recorder.emit(plan.form, buffers, where)
            return written_result(facts, args, kwargs)
        if plan.apart or not plan.special:
            for out in plan.outs:
                if out is None:
                    fresh.append(None)
                    continue
                t, buffer = out[0].new(recorder.heap)
                recorder.emit(out[1], [buffer], where)
                buffers.append(buffer)
                fresh.append(t)
            recorder.emit(plan.form, buffers, where)
            rest = iter(fresh)
            result = [
                next(rest) if name is None else argument(facts, name, args, kwargs) for name in facts.returns_written
            ]
            return result[0] if len(result) == 1 else tuple(result)
        return self._evaluate(facts, plan, buffers, where)

    def _refuse_shared_memory(self, facts: OpFacts, plan: CallPlan, buffers: list[int], call: Call) -> None:
        """Check a call of which two operands are in one buffer. A call that was correct once is not checked again."""
        key = plan.form, *map(buffers.index, buffers)
        if key not in self._share_memory:
            self._builder.trials.refuse_shared_memory(facts, call)
            if len(self._share_memory) >= _MAX_PLANS:
                self._share_memory.clear()
            self._share_memory.add(key)

    def _evaluate(self, facts: OpFacts, plan: CallPlan, buffers: list[int], where: Any) -> Any:
        """Run one operator now, wait for its answer, and make tensors with the shapes that the executor reports."""
        recorder, heap = plan.recorder, plan.recorder.heap
        own = recorder.take_params(plan.form)
        computed = self._host_values.results(recorder, plan.form, buffers, own)
        if computed is not None:
            wait_as_cuda(recorder, recorder.require_link())
            device = torch.device(NAME, recorder.heap.index)
            uploaded = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in computed
            ]
            return uploaded[0] if len(uploaded) == 1 else tuple(uploaded)
        if recorder.replaced:
            recorder.separate([buffers[w] for w in plan.written])  # a failed run must not take the copies with it
        if sync_debug.mode:
            sync_debug.note()
        if recorder.open:
            recorder.require_link().hold()
        recorder.flush()
        recorder.params = own
        ids = [heap.reserve_id() for _ in range(facts.n_returns)]
        try:
            recorder.emit(plan.form, buffers + ids, where)
            recorder.flush(reply=True)
            answer = recorder.require_link().result()
            recorder.idle()
        except BaseException:  # the run failed, or a signal handler ended the wait: no tensor will own these buffers
            heap.dead += ids
            raise
        values = answer.get("values") or []
        if values:
            heap.unreserve(ids)
            return values[0] if len(values) == 1 else tuple(values)
        results: list[Tensor | None] = []
        for buffer, out in zip(ids, answer["outputs"], strict=True):
            if out is None:
                heap.unreserve([buffer])
                results.append(None)
                continue
            layout = Layout(TORCH_DTYPES[BY_LABEL[out["dtype"]]], out["sizes"], out["strides"], out["nbytes"])
            results.append(layout.new(heap, buffer)[0])
            dtype = TORCH_DTYPES[BY_LABEL[out["dtype"]]]
            if "data" in out and dtype in REAL:
                shape, stride = tuple(out["sizes"]), tuple(out["strides"])
                host = tensor_on(bytearray(b64decode(out["data"])), dtype, shape, stride)
                recorder.require_link().keep(buffer, (0, dtype, shape, stride), host)
        if facts.list_return:
            return results
        return results[0] if len(results) == 1 else tuple(results)


def _given_generator(run: Kernel, position: int) -> Kernel:
    """Wrap the kernel of an operator that takes a generator. The client draws from it; the instruction has no generator."""

    def call(*args: Any, **kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs["generator"] = None
        elif position < len(args):
            generator = args[position]
            args = (*args[:position], None, *args[position + 1 :])
        if generator is None:
            return run(*args, **kwargs)
        return run(*args, drawn_from=sequence_of(generator), **kwargs)

    return call


def _later(run: Callable[..., Any], call: Call) -> Callable[[], Any]:
    return partial(run, *call.args, **call.kwargs)


def _without_offsets(signature: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
    """A signature without the offsets of its tensors, and these offsets in bytes, in the order of the tensors."""
    general, offsets = list(signature), []
    for k in range(1, len(signature) - 2):
        if signature[k].__class__ is torch.Size and signature[k - 1].__class__ is torch.dtype:
            place = signature[k + 2]
            offsets.append(place & OFFSET_MASK)
            general[k + 2] = place & ~OFFSET_MASK
    return tuple(general), offsets


def _on_one_device(buffers: list[int]) -> bool:
    """Whether all buffers are on one device. A tensor without a Wooly storage (a meta tensor) has buffer id 0."""
    first = buffers[0] & DEVICE_MASK if buffers else 0
    return all(b and b & DEVICE_MASK == first for b in buffers)


def _lists_on_device(args: tuple[Any, ...]) -> bool:
    """Whether no list of tensors has a host tensor. One without dimensions would travel as a number, and not be written."""
    return not any(t.is_cpu for a in args if isinstance(a, (list, tuple)) for t in a if isinstance(t, Tensor))


def _with_copies(facts: OpFacts, call: Call) -> Call:
    """The call with copies of the tensors that it writes."""

    def copied(a: Any) -> Any:
        return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, a)

    args, kwargs = list(call.args), dict(call.kwargs)
    for name in facts.written:
        at = facts.positions.get(name, len(args))
        if at < len(args):
            args[at] = copied(args[at])
        elif name in kwargs:
            kwargs[name] = copied(kwargs[name])
    return Call(tuple(args), kwargs)


def _collect(a: Any, scalar: bool, key: list[Any], buffers: list[int], params: list[Any]) -> None:
    """Add one argument, which may be nested, to the signature, the buffers and the params."""
    if isinstance(a, Tensor):
        if a.is_cpu:
            if a.dim() != 0:
                raise _HostTensorError
            key += ("number", a.dtype, is_python_number(a))
            _bind(a.item(), params)
        else:
            at = a.data_ptr() or storage.address_of(a)
            key += (a.dtype, a.shape, a.stride(), at & PLACE_MASK)
            buffers.append(at >> ID_SHIFT)
    elif isinstance(a, (list, tuple)):
        key.append(len(a))
        for x in a:
            _collect(x, scalar, key, buffers, params)
    elif scalar and isinstance(a, _NUMBERS):
        key.append(a.__class__)
        _bind(a, params)
    elif scalar and isinstance(a, torch.SymFloat):
        key.append(DeviceNumber)
        _collect(tensor_of(a), False, key, buffers, params)
    else:
        key.append(a)


def _bind(value: Any, params: list[Any]) -> None:
    """Add a number to the params.

    Raises:
        OverflowError: an integer does not fit. PyTorch itself refuses those that do not fit into 64 bits.
    """
    if isinstance(value, complex):
        params += (value.real, value.imag)
    elif value.__class__ is int and value > _MAX_INT:
        raise _WideIntegerError(
            f"the integer {value} is larger than {_MAX_INT}, the largest for this operator on cuda; use a float"
        )
    else:
        params.append(value)


def argument(facts: OpFacts, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument of a call with the name `name`."""
    if name in kwargs:
        return kwargs[name]
    return args[facts.positions[name]]


def written_result(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a mutable operator: the arguments that its schema returns."""
    names = facts.returns_written
    if not names:
        return None
    if len(names) == 1:
        return argument(facts, names[0], args, kwargs) if names[0] else None
    return tuple([argument(facts, n, args, kwargs) for n in names if n])


def _wrote_list(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count a change of each tensor of the lists that the operator writes, as CUDA's kernels do; return the operator's result.

    PyTorch does it for tensors only. Autograd compares the count with that of the tensors that it has saved.
    """
    for name in facts.written:
        increment_version(argument(facts, name, args, kwargs))
    return written_result(facts, args, kwargs)
