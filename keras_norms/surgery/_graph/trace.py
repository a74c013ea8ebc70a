"""Traces the `call` of a block, and checks the result on random data."""

import contextlib
import functools
import inspect
import itertools
import re
import warnings

import keras
import numpy as np
from keras import ops, tree
from keras.utils import is_keras_tensor

from keras_norms import _keras
from keras_norms.surgery._graph.arrays import to_float64
from keras_norms.surgery._graph.calls import Call, call_of, calls_of, is_graph
from keras_norms.surgery._graph.measure import quick_compilation


class _Scope(keras.StatelessScope):
    """Records which variables are read and changed."""

    def __init__(self):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.read, self.changed = [], []

    def get_current_value(self, variable):
        self.read.append(variable.name)

    def add_update(self, update):
        self.changed.append(update[0].name)


class _CannotTrace(Exception):
    pass


class Tracer:
    """Traces `blocks` of a model that has `layers`: `traced` is what `Graph` takes.

    `left` has the blocks that cannot be traced and why, by `id`. It only grows. A block
    in it is a layer like any other, so when one is added, earlier results are void:
    `_trace` starts again with its block, and `graph_of` with the model and a new
    tracer. When nothing is added, the results hold.

    While a tracer is entered, calling a block with symbolic tensors runs its `call` and
    returns aliases of the results. Keras then records the block as their maker, as it
    does without a tracer, and `_real_tensor` leads from them to what is inside.
    """

    def __init__(self, blocks, layers, left):
        self.blocks, self.layers, self.left = blocks, layers, left
        self.traced = {}
        self._same = {}  # id of an output of a block -> it, and what it is inside.
        self._entries, self._made = [], []

    @contextlib.contextmanager
    def entering(self):
        """Let calls of blocks with symbolic tensors go inside, and record nothing."""
        before = [
            (nodes, len(nodes))
            for layer in self.layers
            for each in (layer, *getattr(layer, "operations", ()))
            for nodes in _keras.records_of(each)
        ]
        identities = [x for x in self.layers if type(x) is keras.layers.Identity]
        with contextlib.ExitStack() as stack:
            for layer in (*self.blocks, *identities):
                made = self._symbolic_call(layer)
                stack.enter_context(_keras.replaced(layer, symbolic_call=made))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                for nodes, count in before:
                    del nodes[count:]

    # Models

    def read(self, model):
        """Read a Functional or Sequential model, and the models in it."""
        if id(model) in self.traced:
            return
        inputs, calls, outputs = calls_of(model)
        known = {id(x) for call in calls for x in call.outputs}
        self.traced[id(model)] = ()  # Entered.
        inside = [made for call in calls for made in self._inside(call, known)]
        self._finish(model, inputs, inside, outputs)

    def read_subclassed(self, model):
        """Read a model whose inputs are known from what it was built for."""
        shapes = _keras.shapes_built_for(model)
        if not shapes or None in shapes:
            self._leave(model, "its input shapes are not known")
            return
        inputs = self._inputs_of(model, shapes, self._integers(model, shapes))
        entry = self._trace(model, inputs, {})
        if entry is not None:
            inputs = inputs if len(inputs) > 1 else inputs[0]
            calls = self._calls(tree.flatten((inputs, entry.outputs)), ())
            self._finish(model, inputs, _without_training(calls), entry.outputs)

    def _integers(self, model, shapes):
        """The places of the inputs that an `Embedding` reads, directly or in a block.

        What it reads has another dtype if such an input has.
        """
        if not _keras.layers_of(model, keras.layers.Embedding):
            return set()

        def read(places):
            left = dict(self.left)
            inputs = self._inputs_of(model, shapes, places)
            with _embeddings_watched() as dtypes:
                self._run(model, inputs, {}, training=False)
            self.left = left
            return dtypes

        places = set(range(len(tree.flatten(self._inputs_of(model, shapes, ())))))
        usual = read(places)
        return {place for place in places if read(places - {place}) != usual}

    def _inputs_of(self, model, shapes, integers):
        """Symbolic inputs, integers at these places."""
        places = itertools.count()

        def made(shape):
            dtype = "int32" if next(places) in integers else model.input_dtype
            return keras.Input(shape[1:], dtype=dtype)

        return [tree.map_shape_structure(made, shape) for shape in shapes]

    def _finish(self, model, inputs, calls, outputs):
        outputs = tree.map_structure(self._real_tensor, outputs)
        self.traced[id(model)] = inputs, calls, outputs
        for call in calls:
            if is_graph(call.operation):
                self.read(call.operation)

    def _inside(self, call, known):
        """The calls that the call of a block makes; else the call alone."""
        block, call = call.operation, self._real(call)
        kwargs = dict(call.kwargs)
        if block not in self.blocks:
            return [call]
        # Keras notes a default of False as well.
        if kwargs.pop("training", None):
            self._leave(block, "it is called with training=True")
            return [call]
        entry = self._trace(block, call.args, kwargs)
        if entry is None:
            return [call]
        made = tree.flatten(entry.outputs)
        if [x.shape for x in call.outputs] != [y.shape for y in made]:
            self._leave(block, "Keras computes other output shapes for it")
            return [call]
        self._same |= {id(x): (x, y) for x, y in zip(call.outputs, made)}
        calls = self._calls(made, known)
        known |= {id(x) for call in calls for x in call.outputs}
        return _without_training(calls)

    # Blocks

    def _trace(self, block, args, kwargs):
        """A call of a block, in which blocks that cannot be traced stay, or `None`.

        It must make the same calls in training and at inference.
        """
        while id(block) not in self.left:
            count = len(self.left)
            first = self._run(block, args, kwargs, training=False)
            second = self._run(block, args, kwargs, training=True)
            if len(self.left) > count:
                continue
            found = self._difference(first[-1], second[-1])
            if found is None:
                return first[-1]
            # Find the block inside that differs. Inner ones come first.
            for one, other in zip(first, second):
                same = one.operation is other.operation
                reason = self._difference(one, other) if same else None
                if reason is not None:
                    self._leave(one.operation, reason)
                    break
            else:
                self._leave(block, found)
        return None

    def _run(self, block, args, kwargs, training):
        self._entries, self._made = [], []
        try:
            block(*args, **kwargs, training=training)
        except Exception as e:
            self._leave(block, _first_line(e))
        for each, alias, tensor in self._made:
            if _keras.get_keras_mask(alias) is not _keras.get_keras_mask(tensor):
                self._leave(each, "it gives its output a mask")
        return self._entries

    def _leave(self, block, reason):
        self.left.setdefault(id(block), (block, reason))

    def _symbolic_call(self, block):
        alias = functools.partial(self._alias, block)
        if type(block) is keras.layers.Identity:
            return alias  # It is there for its name alone.
        original = block.symbolic_call

        def symbolic_call(*args, **kwargs):
            if id(block) in self.left:
                return original(*args, **kwargs)
            try:
                outputs = self._enter(block, args, kwargs)
            except _CannotTrace as e:
                self._leave(block, str(e))
                return original(*args, **kwargs)
            # Keras notes the block as what made its outputs.
            return tree.map_structure(alias, outputs)

        return symbolic_call

    def _enter(self, block, args, kwargs):
        if block.activity_regularizer is not None:
            raise _CannotTrace("it has an activity regularizer")
        before, scope = dict(vars(block)), _Scope()
        outputs, failure = (), None
        try:
            with scope:
                outputs = block.call(*args, **kwargs)
        except Exception as e:
            failure = _first_line(e)
        changed = [k for k, v in vars(block).items() if before.get(k) is not v]
        if changed:
            vars(block).clear()
            vars(block).update(before)
        others = not all(map(is_keras_tensor, tree.flatten(outputs)))
        for is_so, reason in (
            (changed, f"it sets {sorted(changed)}"),
            (scope.changed, f"it changes its variables {sorted(set(scope.changed))}"),
            (scope.read, f"it reads its variables {sorted(set(scope.read))}"),
            (scope.losses, "it adds losses"),
            (failure, failure),
            (others, "it returns something that is not a tensor"),
        ):
            if is_so:
                raise _CannotTrace(reason)
        entry = Call(block, args, kwargs, outputs)
        for call in self._calls_of(entry):
            name = call.operation.name
            for leaf in tree.flatten((call.args, call.kwargs)):
                if isinstance(leaf, keras.Variable):
                    raise _CannotTrace(f"it reads its variables ['{leaf.name}']")
                if inspect.isroutine(leaf):
                    raise _CannotTrace(f"it passes a function to '{name}'")
            try:
                is_graph(call.operation) or call.operation.get_config()
            except Exception as e:
                text = f"it calls '{name}', which has no configuration"
                raise _CannotTrace(text) from e
        self._entries.append(entry)
        return outputs

    # Whether a block is the calls that it makes

    def _difference(self, one, other):
        """Say how calls of a block at inference and in training differ, or `None`."""
        ours, others = self._calls_of(one), self._calls_of(other)
        if self._form(one, ours) != self._form(other, others):
            return "it makes other calls in training than at inference"
        for mine, yours in zip(ours, others):
            modes = [call.kwargs.get("training", "any") for call in (mine, yours)]
            if modes not in (["any", "any"], [False, True]):
                return (
                    f"it always calls '{mine.operation.name}' with training={modes[0]}"
                )
        return self._wrong_values(one, ours)

    def _form(self, entry, calls):
        """A call of a block as text, in which tensors are numbered."""
        numbers = {}

        def text(leaf):
            if not is_keras_tensor(leaf):
                return repr(leaf)
            return str(numbers.setdefault(id(self._real_tensor(leaf)), len(numbers)))

        lines = [str(tree.map_structure(text, entry.args))]
        for operation, args, kwargs, outputs in _without_training(calls):
            settings = id(operation)
            if not getattr(operation, "variables", ()):  # It may be made in the call.
                settings = {**operation.get_config(), "name": None}
            made = tree.map_structure(text, (args, kwargs, outputs))
            lines.append(f"{type(operation)} {settings} {made}")
        return [*lines, str(tree.map_structure(text, entry.outputs))]

    def _wrong_values(self, entry, calls):
        """Say how `calls` fail on random data, or `None`."""
        leaves = tree.flatten((entry.args, entry.kwargs))
        inputs = [self._real_tensor(x) for x in leaves if is_keras_tensor(x)]
        block = entry.operation

        def run(state, arrays):
            """What the calls make, and what the block makes."""
            values = {id(x): y for x, y in zip(inputs, arrays)}

            def fill(*structures):
                return tree.map_structure(
                    lambda leaf: values.get(id(self._real_tensor(leaf)), leaf),
                    structures,
                )

            with keras.StatelessScope(zip(block.variables, state)):
                args, kwargs = fill(entry.args, entry.kwargs)
                expected = block(*args, **{**kwargs, "training": False})
                for call in calls:
                    args, kwargs = fill(call.args, call.kwargs)
                    if isinstance(call.operation, keras.layers.Layer):
                        kwargs["training"] = False
                    made = tree.flatten(call.operation(*args, **kwargs))
                    values.update((id(x), y) for x, y in zip(call.outputs, made))
            return tree.flatten(fill(entry.outputs)), tree.flatten(expected)

        if keras.backend.backend() == "jax":
            import jax

            run = jax.jit(run)  # Otherwise JAX compiles each operation by itself.
        rng = np.random.default_rng(0)
        try:
            with quick_compilation():
                state = [v.value for v in block.variables]
                made = run(state, [_draw(rng, x) for x in inputs])
        except Exception as e:
            return f"it fails on random data: {_first_line(e)}"
        limit = 1e-2 if "16" in block.compute_dtype else 1e-5
        for x, y in zip(*made, strict=True):
            x, y = to_float64(x), to_float64(y)
            size = np.max(np.abs(y), initial=0, where=np.isfinite(y))
            if x.shape != y.shape or not np.allclose(
                x, y, rtol=0, atol=limit * size, equal_nan=True
            ):
                return "its layers, called one by one, give other values"
        return None

    # Tensors and calls

    def _alias(self, layer, tensor):
        alias = keras.KerasTensor(tensor.shape, tensor.dtype)
        if _keras.get_keras_mask(tensor) is not None:
            _keras.set_keras_mask(alias, _keras.get_keras_mask(tensor))
        self._same[id(alias)] = (alias, tensor)
        self._made.append((layer, alias, tensor))
        return alias

    def _real_tensor(self, leaf):
        while id(leaf) in self._same:
            leaf = self._same[id(leaf)][1]
        return leaf

    def _real(self, call):
        args, kwargs = tree.map_structure(self._real_tensor, call[1:3])
        return call._replace(args=args, kwargs=kwargs)

    def _calls_of(self, entry):
        inputs = {id(self._real_tensor(x)) for x in tree.flatten(entry[1:3])}
        return self._calls(tree.flatten(entry.outputs), inputs)

    def _calls(self, tensors, known):
        """The calls that make some tensors from known ones, in order."""

        def nodes_of(tensors):
            real = map(self._real_tensor, tensors)
            found = [_keras.node_of(x) for x in real if id(x) not in known]
            return [node for node in reversed(found) if node not in done]

        calls, done = [], set()
        waiting = nodes_of(tensors)
        while waiting:
            node = waiting.pop()
            before = nodes_of(node.input_tensors)
            if before:
                waiting += [node, *before]
            elif node not in done:
                done.add(node)
                calls.append(self._real(call_of(node)))
        return calls


def _without_training(calls):
    """Calls that follow the mode of the model."""
    return [
        call._replace(kwargs={k: v for k, v in call.kwargs.items() if k != "training"})
        for call in calls
    ]


def _draw(rng, tensor):
    """Random data for a symbolic tensor; for integers and masks, zeros and ones."""
    shape = [32 if n is None else n for n in tensor.shape]
    shape[:1] = [2 if n is None else n for n in tensor.shape[:1]]
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    made = rng.normal(size=shape)
    made = made if keras.backend.is_float_dtype(dtype) else made > 0
    return ops.cast(made, dtype)


def _first_line(error):
    """What an error says, without what Keras puts before it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered"):
        lines = lines[1:]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _embeddings_watched():
    """A list that receives the dtype of what each called `Embedding` reads."""
    dtypes: list[str] = []
    original = keras.layers.Embedding.__call__

    def call(self, *args, **kwargs):
        read = tree.flatten((args, kwargs))[0]
        dtypes.append(keras.backend.standardize_dtype(read.dtype))
        return original(self, *args, **kwargs)

    keras.layers.Embedding.__call__ = call
    try:
        yield dtypes
    finally:
        del keras.layers.Embedding.__call__
