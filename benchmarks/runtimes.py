"""Programs that run what Keras exports, and what they need for int8.

Given the path of a file, each makes a function from one image to its outputs.
"""

import warnings


def saved_model(path):
    import tensorflow as tf

    model = tf.saved_model.load(path)
    return lambda x: model.serve(tf.constant(x)).numpy()


def litert(path):
    import tensorflow as tf

    # It has moved to a separate package.
    with warnings.catch_warnings(action="ignore"):
        interpreter = tf.lite.Interpreter(str(path), num_threads=1)
    (given,) = interpreter.get_input_details()
    (made,) = interpreter.get_output_details()
    interpreter.allocate_tensors()

    def run(x):
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(made["index"])

    return run


def litert_int8(images):
    """Arguments of `export`: kernels and activations in int8, logits in float32."""
    import tensorflow as tf

    return {
        "optimizations": [tf.lite.Optimize.DEFAULT],
        "representative_dataset": lambda: ([image[None]] for image in images),
        "target_spec": {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]},
    }


def onnx(path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def onnx_int8(path, images):
    """Writes the same network with a scale for each channel of a kernel."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(quantization.CalibrationDataReader):
        batches = iter([{"x": image[None]} for image in images])

        def get_next(self):
            return next(self.batches, None)

    prepared, quantized = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
    quant_pre_process(path, prepared, skip_symbolic_shape=True)
    quantization.quantize_static(prepared, quantized, Images(), per_channel=True)
    return quantized


def openvino(path):
    import openvino

    # By default, some processors would compute in bfloat16.
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(path, "CPU", settings)
    return lambda x: model(x)[0]
