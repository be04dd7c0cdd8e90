"""Attention of transformers whose rotary embedding is :func:`amp_kernels.rotary`.

The attention's own forward runs. The function ``apply_rotary_pos_emb`` of its model file is replaced there, as Liger does it, by one
that calls the model's own except inside the forward of a converted attention: other models of that file stay as they are.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .._checks.lists import FLOATS
from .._dispatch import autocast
from .._dispatch.library import PLAIN
from .._raw.rotary import MAX_WIDTH, turned
from ..ops.rotary import rotary
from ._derived import base_of, own_forward, shows
from ._probe import same, values
from ._wrapped import own_class

NAME = "apply_rotary_pos_emb"

#: Model files of transformers, ``models/<name>/modeling_<name>.py``, whose function turns pairs of neighbours.
INTERLEAVED = "blt cohere cohere2 cohere2_moe efficientloftr ernie4_5_vl_moe glm4v glm_ocr lightglue"
#: Those whose function turns the first half of a head, or of its turned part, with the second.
HALVES = """
afmoe apertus apertus1p5 arcee aria axk1 axk2 bamba beam bitnet chameleon cohere_compass cosmos3_edge csm cwm dbrx
deepseek_ocr2 deepseek_v3 deepseek_v32 dia diffllama doge dory dots1 dots3_note embedding_gemma2 emu3 esm esmc
esmfold2 eurobert evolla exaone4 exaone4_5 exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3 glm4_moe
glm4_moe_lite glm4v_moe glm_image glmasr gpt_neox gpt_neox_japanese gradium_phonon_tts granite granite4_vision
granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm_text
hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hyperclovax idefics jais2 jetmoe jina_embeddings_v3 kolibri1
kyutai_speech_to_text laguna lara_mini lasr lfm2 lfm2_moe lfm3 llama mellum mimi mimo_v2_flash minicpm3 minimax
minimax_m2 minimax_m3_vl ministral ministral3 mistral mistral4 mixtral mllama modernbert modernbert_decoder molmo2
moshi muse_glimmer muse_spark nemotron nemotron3_5_transcribe nemotron3_diarization neomme neucodec nomic_bert olmo
olmo2 olmo3 olmo_hybrid olmoe paddleocr_vl persimmon phi phi3 phi4_multimodal phimoe pixtral pocket_tts
pocket_tts_audio_tokenizer qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2
step3p7 t5gemma t5gemma2 timesfm2_5 ultrabert unlimited_ocr vaultgemma voxtral_realtime xcodec2 youtu zamba2 zaya
"""
_running = threading.local()  # its ``attention`` is true inside the forward of a converted attention


def _file(kind: type[torch.nn.Module]) -> Any:
    return sys.modules.get(getattr(getattr(kind, "forward", None), "__module__", ""))


def is_attention(module: torch.nn.Module) -> bool:
    """True for an unconverted attention of a model file that has such a function."""
    kind = own_class(module)
    is_own = "forward" not in vars(module) and base_of(kind) is None
    return is_own and kind.__name__.endswith("Attention") and hasattr(_file(kind), NAME)


def fusible(module: torch.nn.Module) -> bool:
    """True for an attention whose rotary embedding :func:`amp_kernels.rotary` can make. Its file's function is replaced."""
    return is_attention(module) and _replace(own_class(module))


def _replace(kind: type[torch.nn.Module]) -> bool:
    file = _file(kind)
    own = getattr(file, NAME)
    if hasattr(own, "replaced"):
        return True
    package, _, family = file.__name__.rpartition(".modeling_")
    interleaved = family in INTERLEAVED.split()
    known = package == f"transformers.models.{family}" and (interleaved or family in HALVES.split())
    replacement = _replacement(own, interleaved) if known else None
    if replacement is not None:
        setattr(file, NAME, replacement)
    return replacement is not None


def restore(kind: type[torch.nn.Module]) -> None:
    """Undo the replacement. The next call of an attention that is still converted makes it again."""
    file = _file(kind)
    setattr(file, NAME, getattr(getattr(file, NAME), "replaced", getattr(file, NAME)))


@functools.cache
def _replacement(own: Callable, interleaved: bool) -> Callable | None:
    """``None`` if ``own`` computes something else, in a version of transformers that this package does not know."""
    q, k = values(2, 3, 5, 8, dtype=torch.float32), values(2, 1, 5, 8, dtype=torch.float32, seed=0.3)
    cos, sin = (values(2, 5, 8, dtype=torch.float32, seed=seed) for seed in (0.7, 0.9))
    if not same(
        lambda q: torch.cat(own(q, k, cos, sin), dim=1),
        lambda q: turned(torch.cat([q, k], dim=1), cos[:, None], sin[:, None], interleaved),
        q,
        1e-5,
    ):
        return None

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not getattr(_running, "attention", False):
            return own(*args, **kwargs)
        if len(args) == 4 and not kwargs and _takes(*args):
            return rotary(*args, interleaved=interleaved)
        return own(*args, **kwargs)

    call.replaced = own
    return call


def _takes(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """True if the result has the dtype that it has without this package, or autocast's."""
    return (
        all(type(t) in PLAIN and t.dtype in FLOATS and t.device == q.device for t in (q, k, cos, sin))
        and q.ndim == k.ndim == 4
        and k.shape == (q.shape[0], k.shape[1], *q.shape[2:])
        and cos.shape in ((1, q.shape[2], cos.shape[-1]), (q.shape[0], q.shape[2], cos.shape[-1]))
        and cos.shape == sin.shape
        and cos.shape[-1] <= q.shape[-1] <= MAX_WIDTH
        and cos.shape[-1] % 2 == q.shape[-1] % 2 == 0
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and (q.dtype == torch.float64) == (cos.dtype == torch.float64)
        and (autocast.dtype_on(q.device.type) is not None or torch.promote_types(q.dtype, cos.dtype) == q.dtype)
    )


@shows("amp_kernels.convert(fuse_rotary=True)")
def forward(self, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # the compiler fuses these operations itself
        return own_forward(self, *args, **kwargs)
    _replace(self._amp_kernels_base)
    before, _running.attention = getattr(_running, "attention", False), True
    try:
        return own_forward(self, *args, **kwargs)
    finally:
        _running.attention = before
