"""Calls of blocks traced with symbolic tensors, see blocks.py."""

import contextlib
import functools
import inspect
import warnings

import keras
from keras import tree
from keras.utils import is_keras_tensor

from keras_norms import _keras
from keras_norms.surgery._graph.comparison import difference, first_line
from keras_norms.surgery._graph.graph import Call, call_of, calls_of, is_graph


class _Scope(keras.StatelessScope):
    """Takes down which variables are read and changed."""

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
    """Traces blocks: `traced` is what `Graph` takes.

    `left` has the blocks that cannot be traced and why, by `id`. More are added.
    """

    def __init__(self, blocks, left):
        self.blocks = {id(block): block for block in blocks}
        identities = {
            id(layer): layer
            for block in blocks
            for layer in _keras.layers_of(block)
            if type(layer) is keras.layers.Identity
        }
        self._inside = [*blocks, *identities.values()]
        self.traced, self.left = {}, left
        self._same = {}  # id of an output of a block -> it, and what it is inside.
        self._entries, self._made = [], []

    @contextlib.contextmanager
    def entering(self, layers):
        """Let calls of blocks with symbolic tensors go inside; leave no trace of it."""
        before = [
            (nodes, len(nodes))
            for layer in layers
            for each in (layer, *getattr(layer, "operations", ()))
            for nodes in _keras.records_of(each)
        ]
        with contextlib.ExitStack() as stack:
            for layer in self._inside:
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
        result = []
        for call in calls:
            inner = None
            if id(call.operation) in self.blocks:
                inner = self._calls_inside(call, known)
            result += [self._real(call)] if inner is None else inner
        self._finish(model, inputs, result, outputs)

    def read_subclassed(self, model):
        """Read a model whose inputs are known from what it was built for."""
        shapes = _keras.shapes_built_for(model)
        if not shapes or None in shapes:
            self._leave(model, "the shapes of the inputs it is built for are not known")
            return
        layers = _keras.layers_of(model)
        reads_numbers = any(isinstance(x, keras.layers.Embedding) for x in layers)
        dtype = "int32" if reads_numbers else model.input_dtype
        inputs = [
            tree.map_shape_structure(lambda s: keras.Input(s[1:], dtype=dtype), shape)
            for shape in shapes
        ]
        entry = self._trace(model, inputs, {})
        if entry is not None:
            inputs = inputs if len(inputs) > 1 else inputs[0]
            calls = self._calls(tree.flatten((inputs, entry.outputs)), ())
            self._finish(model, inputs, _without_training(calls), entry.outputs)

    def _finish(self, model, inputs, calls, outputs):
        outputs = tree.map_structure(self._real_tensor, outputs)
        self.traced[id(model)] = inputs, calls, outputs
        for call in calls:
            if is_graph(call.operation):
                self.read(call.operation)

    def _calls_inside(self, call, known):
        """The calls that a call of a block makes, or `None`."""
        kwargs = dict(call.kwargs)
        # Keras notes a default of False as well.
        if kwargs.pop("training", None):
            self._leave(call.operation, "it is called with training=True")
            return None
        given = tree.map_structure(self._real_tensor, (call.args, kwargs))
        entry = self._trace(call.operation, *given)
        if entry is None:
            return None
        made = tree.flatten(entry.outputs)
        if [x.shape for x in call.outputs] != [y.shape for y in made]:
            self._leave(call.operation, "Keras takes it to make other shapes")
            return None
        for x, y in zip(call.outputs, made):
            self._same[id(x)] = (x, y)
        calls = self._calls(made, known)
        known |= {id(x) for call in calls for x in call.outputs}
        return _without_training(calls)

    # Blocks

    def _trace(self, block, args, kwargs):
        """A call of a block without what cannot be traced in it, or `None`.

        In training and in inference it must make the same calls.
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
            # Which of the blocks inside is it? Inner ones come first.
            for one, other in zip(first, second):
                same = one.operation is other.operation
                reason = self._difference(one, other) if same else None
                if reason is not None:
                    self._leave(one.operation, reason)
                    break
            else:
                self._leave(block, found)
        return None

    def _difference(self, one, other):
        calls = self._calls_of(one), self._calls_of(other)
        return difference(one, other, *calls, self._real_tensor)

    def _run(self, block, args, kwargs, training):
        self._entries, self._made = [], []
        try:
            block(*args, **kwargs, training=training)
        except Exception as e:
            self._leave(block, first_line(e))
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
            failure = first_line(e)
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
            (others, "it returns other things than tensors"),
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
                    raise _CannotTrace(f"it gives '{name}' a function")
            try:
                is_graph(call.operation) or call.operation.get_config()
            except Exception as e:
                text = f"it calls '{name}', which has no configuration"
                raise _CannotTrace(text) from e
        self._entries.append(entry)
        return outputs

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

        def node_of(x):
            x = self._real_tensor(x)
            if id(x) in known:
                return None
            return _keras.node_of(x)

        calls, done = [], set()
        waiting = [node_of(x) for x in reversed(tensors)]
        while waiting:
            node = waiting[-1]
            if node is None or node in done:
                waiting.pop()
                continue
            before = [n for n in map(node_of, node.input_tensors) if n not in done]
            before = [n for n in reversed(before) if n is not None]
            if before:
                waiting += before
                continue
            done.add(waiting.pop())
            calls.append(self._real(call_of(node)))
        return calls


def _without_training(calls):
    """Calls that follow the mode of the model."""
    return [
        call._replace(kwargs={k: v for k, v in call.kwargs.items() if k != "training"})
        for call in calls
    ]
