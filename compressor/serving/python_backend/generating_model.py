"""A model that generates, in Triton's Python backend, which sends a text in parts; copied as `model.py`.

The folder of the version has the graphs, the tokenizer and copies of the modules that run them (`GENERATION` in
`compressor.serving.model_files`). The server's Python needs `onnxruntime`, `torch`, `transformers` and `numpy<2`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))
from compressor.generation.engine_model import EngineModel
from compressor.generation.runner import Runner, read_generation_config
from compressor.targets.onnxruntime.sessions import OrtSessions

_OPTIONS = {"max_tokens": "max_new_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
"""Name of an input -> option of transformers' `generate`."""
_WARM_UP = "one"


class TritonPythonModel:
    """One instance of the model, which generates one text at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graphs on the instance's device, and generate a token, which the first text then does not wait for.

        Raises:
            RuntimeError: NumPy 2 is installed, which the backend does not support.
        """
        if int(np.__version__.split(".")[0]) > 1:
            # The backend reads arrays of NumPy 2 as empty ones (python_backend, pull request 384).
            raise RuntimeError(f"NumPy {np.__version__}: Triton's Python backend needs numpy<2")
        parameters = json.loads(args["model_config"])["parameters"]
        positions, threads = (
            int(parameters[name]["string_value"]) if name in parameters else None
            for name in ("positions", "intra_op_thread_count")
        )
        is_gpu = args["model_instance_kind"] == "GPU"
        if is_gpu:  # of the only process that the instance has
            os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        folder = Path(__file__).parent
        torch.set_num_threads(threads or torch.get_num_threads())
        sessions = OrtSessions(folder, provider="cuda" if is_gpu else "cpu", threads=threads)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        model = EngineModel.of(getattr(transformers, config.architectures[0]), config, sessions)
        read_generation_config(model, folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.runner = Runner(folder, model, tokenizer, positions)
        self.runner.complete([_WARM_UP], max_new_tokens=1)

    def execute(self, requests: list[Any]) -> None:
        """Send the text of each request, one after the other; an error ends one text only."""
        for request in requests:
            sender, failure = request.get_response_sender(), None
            try:
                self._send(request, sender)
            except Exception as error:  # of any option, and of the runtime
                text = " ".join(str(error).split()) or type(error).__name__
                failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
            if failure is None:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                sender.send(failure, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, request: Any, sender: Any) -> None:
        """Send a response for each token, whose text is empty until a word is complete, until the client has gone."""
        prompt = _values(request, "text_input")[0].decode()
        options = {option: values[0].item() for name, option in _OPTIONS.items() if (values := _values(request, name))}
        seed, chat = (values[0].item() if (values := _values(request, name)) else None for name in ("seed", "chat"))
        parts, tokens = list[str](), 0

        def respond() -> None:
            text = np.array(["".join(parts).encode()], np.object_)
            outputs = [pb_utils.Tensor("text_output", text), pb_utils.Tensor("tokens", np.array([tokens], np.int32))]
            sender.send(pb_utils.InferenceResponse(outputs))
            parts.clear()

        class Sent(transformers.StoppingCriteria):
            """Sends what is new after each token; true for a client that has gone."""

            def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
                nonlocal tokens
                tokens += 1
                has_gone = bool(sender.is_cancelled())
                if not has_gone:
                    respond()
                return torch.full((len(input_ids),), has_gone)

        self.runner.complete(
            [prompt],
            chat=bool(chat),
            stop=[text.decode() for text in _values(request, "stop")],
            seed=seed,
            write=parts.append,
            num_beams=1,
            stopping_criteria=[Sent()],
            **options,
        )
        if parts and not sender.is_cancelled():
            respond()


def _values(request: Any, name: str) -> list[Any]:
    """The values of an input, which is empty if the client does not send it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else list(tensor.as_numpy().ravel())
