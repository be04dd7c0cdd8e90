"""Models of transformers and torchvision, small and with random weights, are converted as they come and train as before.

The measure is the model in float64. Torch's own run in the format under test is some distance from it, the root of the sum
of the squares of thousands of roundings; the converted model rounds to the same format in about as many places, so twice
torch's distance bounds its own: for the result, for all gradients together, and for the change of the weights by 20 steps
of AdamW. The float64 models of some families compute their norms in fp32, hence a floor of a few of its roundings.
"""

import copy
import importlib
import importlib.util

import pytest
import torch
import torchvision.models as vision
import transformers

import amp_kernels as ak
from amp_kernels.nn import rotary

STEPS = 20
FLOOR = 2.0**-21
WIDE = torch.float64

TEXT = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2():
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TEXT, **sizes, **no_dropout, loss_type="ForCausalLM"))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **SIZES, num_key_value_heads=2))


def _looping(model):
    """With the experts' loop, for float64; torch's grouped product does not take it."""
    model.set_experts_implementation("eager")
    return model


def mixtral():
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _looping(transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, **SIZES, **sizes)))


def olmoe():
    sizes = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    return _looping(transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**TEXT, **SIZES, **sizes)))


def qwen3_moe():
    sizes = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _looping(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TEXT, **SIZES, **sizes)))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **SIZES, **NO_DROPOUT))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**TEXT, **sizes, decoder_start_token_id=0, feed_forward_proj="gated-gelu")
    )


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=5)
    )


def resnet():
    model = vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)
    model.layer3, model.layer4, model.fc = torch.nn.Sequential(), torch.nn.Sequential(), torch.nn.Linear(128, 5)
    return model


def convnext():
    setting = [vision.convnext.CNBlockConfig(8, 16, 1), vision.convnext.CNBlockConfig(16, None, 1)]
    return vision.ConvNeXt(setting, stochastic_depth_prob=0.0, layer_scale=0.5, num_classes=5)


def swin():
    return vision.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [2, 2], num_classes=5, stochastic_depth_prob=0.0)


#: Modules that each holds after conversion, by class: the parts of it that this test is there for.
FAMILIES = {
    gpt2: {"Conv1D", "LayerNorm", "GPT2MLP", "NewGELUActivation", "Linear"},
    llama: {"Linear", "LlamaRMSNorm", "LlamaMLP", "SiLUActivation"},
    mixtral: {"Linear", "MixtralExperts", "MixtralRMSNorm"},
    olmoe: {"Linear", "OlmoeExperts", "OlmoeRMSNorm"},
    qwen3_moe: {"Linear", "Qwen3MoeExperts", "Qwen3MoeRMSNorm"},
    bert: {"Linear", "LayerNorm", "BertIntermediate", "GELUActivation"},
    t5: {"Linear", "T5LayerNorm", "T5DenseGatedActDense", "NewGELUActivation"},
    vit: {"Linear", "LayerNorm", "ViTMLP", "GELUActivation"},
    resnet: {"Linear"},
    convnext: {"Linear", "LayerNorm", "Sequential", "GELU"},
    swin: {"Linear", "LayerNorm", "MLP", "GELU"},
}

MIXTURES = (mixtral, olmoe, qwen3_moe)


def batches(family):
    """Calls of the model that return its logits and its loss, the same for every copy."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        labels = torch.randint(1, 61, (4, 12), generator=generator)
        images, kinds = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(5, (4,), generator=generator)

        def call(model, labels=labels, images=images, kinds=kinds):
            images = images.to(next(model.parameters()).dtype)
            if family in (gpt2, llama, mixtral, olmoe, qwen3_moe, phi, bert, t5):
                out = model(input_ids=labels, labels=labels)
            elif family is vit:
                out = model(pixel_values=images, labels=kinds)
            else:
                logits = model(images)
                return logits, torch.nn.functional.cross_entropy(logits, kinds)
            return out.logits, out.loss

        yield call


def flat(tensors):
    return torch.cat([tensor.detach().to(WIDE).flatten() for tensor in tensors])


def trained(model, family, dtype, amp, optimizer):
    """Logits and all gradients of the first step, and the change of all weights after the last."""
    before = flat(model.parameters())
    scaler = amp("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    first = None
    for call in batches(family):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
            logits, loss = call(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if first is None:
            first = flat([logits]), flat(p.grad for p in model.parameters() if p.grad is not None)
        scaler.step(optimizer)
        scaler.update()
    return *first, flat(model.parameters()) - before


@pytest.fixture(autouse=True)
def one_thread(threads):
    """A second thread makes models as small as these slower."""
    threads(1)


@pytest.mark.own_backend
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_trains_as_before(family):
    torch.manual_seed(0)
    model = family()
    ours = ak.convert(copy.deepcopy(model))
    made = {type(m).__name__ for m in ours.modules() if type(m).__module__.startswith("amp_kernels")}
    assert made >= FAMILIES[family]
    assert ours.state_dict().keys() == model.state_dict().keys()
    options = {"lr": 1e-3, "weight_decay": 0.1}
    wide = copy.deepcopy(model).to(WIDE)
    exact = trained(wide, family, WIDE, torch.amp.GradScaler, torch.optim.AdamW(wide.parameters(), **options))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        copies = copy.deepcopy(model), copy.deepcopy(ours)
        optimizers = (
            torch.optim.AdamW(copies[0].parameters(), **options),
            ak.optim.AdamW(copies[1].parameters(), **options),
        )
        scalers = torch.amp.GradScaler, ak.GradScaler
        theirs, found = (trained(m, family, dtype, s, o) for m, s, o in zip(copies, scalers, optimizers, strict=True))
        for name, e, t, f in zip(("logits", "gradients", "weights"), exact, theirs, found, strict=True):
            # By a rounding a token may go to another expert, which Adam's first steps, of one size for all gradients, make large.
            room = 4 if name == "weights" and family in MIXTURES else 2
            distance, allowed = (f - e).norm(), room * (t - e).norm() + FLOOR * e.norm()
            print(family.__name__, dtype, name, f"{distance / e.norm():.2e} {(t - e).norm() / e.norm():.2e}")
            assert distance <= allowed, (dtype, name)


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TEXT, **SIZES, num_key_value_heads=2, head_dim=8))


@pytest.mark.own_backend
@pytest.mark.parametrize(("family", "fused"), [(gpt2, True), (llama, True), (gemma2, False)])
def test_head_and_loss_are_one_op(family, fused):
    """The loss and the gradients of the two ops, to a few roundings of FP32. Gemma 2 caps its logits before the loss."""
    torch.manual_seed(0)
    plain = ak.convert(family())
    ours = ak.convert(copy.deepcopy(plain), fuse_loss=True)
    ids = torch.randint(1, 61, (4, 12))
    labels = ids.masked_fill(torch.arange(12) < 3, -100)
    outputs = [model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(30)) for model in (plain, ours)]
    assert ("logits" in outputs[1]) != fused
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    for output in outputs:
        output.loss.backward()
    found, expected = (flat(p.grad for p in model.parameters()) for model in (ours, plain))
    assert (found - expected).norm() <= 2.0**-18 * expected.norm()


@pytest.mark.own_backend
@pytest.mark.parametrize(
    "family", [gpt2, llama, qwen3_moe, lambda: cohere()], ids=["gpt2", "llama", "qwen3_moe", "cohere"]
)
def test_log_probs_of_tokens(family):
    """Those of the model's logits, to a few roundings of FP32, where no padding is. Cohere scales its logits."""
    torch.manual_seed(0)
    model = ak.convert(family().eval(), fuse_loss=True)
    ids, mask = torch.randint(1, 61, (4, 12)), torch.ones(4, 12, dtype=torch.int64)
    mask[0, :5] = mask[1, 9:] = 0
    found, entropy = ak.nn.token_log_probs(model, ids, mask, temperature=0.8, entropy=True)
    log_p = (model(input_ids=ids, attention_mask=mask).logits[:, :-1].double() / 0.8).log_softmax(-1)
    counted = (mask[:, 1:] & mask[:, :-1]).bool()
    want = log_p.gather(-1, ids[:, 1:, None])[..., 0].where(counted, 0.0)
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        entropy.double(), -(log_p.exp() * log_p).sum(-1).where(counted, 0.0), rtol=2e-6, atol=2e-6
    )


@pytest.mark.own_backend
def test_log_probs_of_capped_logits_are_refused():
    with pytest.raises(ValueError, match="no causal head"):
        ak.nn.token_log_probs(ak.convert(gemma2(), fuse_loss=True), torch.zeros(1, 4, dtype=torch.int64))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT, **SIZES, num_key_value_heads=2))


def qwen3():
    sizes = {"num_key_value_heads": 2, "head_dim": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, **SIZES, **sizes))


def phi():
    return transformers.PhiForCausalLM(transformers.PhiConfig(**TEXT, **SIZES))


def cohere():
    return transformers.CohereForCausalLM(transformers.CohereConfig(**TEXT, **SIZES, num_key_value_heads=2))


@pytest.mark.own_backend
@pytest.mark.parametrize("family", [llama, mistral, qwen3, qwen3_moe, phi, cohere], ids=lambda family: family.__name__)
def test_attention_turns_queries_and_keys_by_one_op(family):
    """Also half of a head in Phi, interleaved in Cohere: to a few roundings of FP32. The plain model is of the same file."""
    torch.manual_seed(0)
    plain = ak.convert(family())
    for name, parameter in plain.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    ours = ak.convert(copy.deepcopy(plain), fuse_rotary=True)
    fused = {type(m).__name__ for m in ours.modules() if type(m).__module__ == "amp_kernels.nn.rotary"}
    assert fused == {type(plain).__name__.removesuffix("ForCausalLM") + "Attention"}
    ids = torch.randint(1, 61, (4, 12))
    outputs = [model(input_ids=ids, labels=ids) for model in (plain, ours)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    for output in outputs:
        output.loss.backward()
    found, expected = (flat(p.grad for p in model.parameters() if p.grad is not None) for model in (ours, plain))
    assert (found - expected).norm() <= 2.0**-18 * expected.norm()
    with torch.no_grad():  # token by token, with a cache
        cached = ours.generate(ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert torch.equal(cached, plain.generate(ids[:1, :4], max_new_tokens=3, do_sample=False))


FILES = sorted((rotary.HALVES + rotary.INTERLEAVED).split())


@pytest.mark.parametrize(
    "name", [name if i % 9 == 0 else pytest.param(name, marks=pytest.mark.exhaustive) for i, name in enumerate(FILES)]
)
def test_a_model_file_computes_what_the_table_says(name):
    path = f"transformers.models.{name}.modeling_{name}"
    if importlib.util.find_spec(f"transformers.models.{name}") is None:
        pytest.skip("this version of transformers does not have it")
    own = getattr(importlib.import_module(path), rotary.NAME)
    assert rotary._replacement(getattr(own, "replaced", own), name in rotary.INTERLEAVED.split()) is not None


#: The blocks whose additions are made by norms, and the number of these.
FUSED = {
    gpt2: ({"GPT2Block"}, 4),
    llama: ({"LlamaDecoderLayer"}, 4),
    mixtral: ({"MixtralDecoderLayer"}, 4),
    phi: ({"PhiDecoderLayer"}, 2),
    bert: ({"BertSelfOutput", "BertOutput"}, 4),
    t5: ({"T5LayerSelfAttention", "T5LayerCrossAttention", "T5LayerFF"}, 5),
    vit: ({"ViTLayer"}, 4),
    swin: ({"SwinTransformerBlock"}, 3),
}


@pytest.mark.own_backend
@pytest.mark.parametrize("family", FUSED, ids=lambda family: family.__name__)
def test_norms_make_the_additions(family, op_calls):
    torch.manual_seed(0)
    plain = ak.convert(family())
    ours = ak.convert(copy.deepcopy(plain), fuse_residuals=True)
    fused = {type(m).__name__ for m in ours.modules() if type(m).__module__ == "amp_kernels.nn.residual"}
    blocks, additions = FUSED[family]
    assert fused == blocks
    call, found = next(batches(family)), []
    for model in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = call(model)
        loss.backward()
        found.append((logits, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert sum(len(args) > 3 and args[3] is not None for args, _ in op_calls["norm_forward"]) == additions
    logits, *same = map(torch.equal, *found)
    assert logits
    assert all(same) or family is swin  # the gradient of its stream, which has 16 bits, is rounded once less
