"""TRL's GRPOTrainer in FP16: log-probabilities by `ak.nn.token_log_probs`, `ak.GradScaler` as accelerate's scaler, `ak.optim.AdamW`.

python examples/rl_trl.py          (needs trl; run with 1.16)

Expected on a CPU: distance 0.55 -> 0.01, in 15 seconds of one core with 1.5 GB of memory (AMD EPYC).
"""

import inspect
import tempfile

import torch
from datasets import Dataset, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import amp_kernels as ak

device, letters = "cuda" if torch.cuda.is_available() else "cpu", "abcdefghijklmnopqrstuvwxyz "
method = vars(GRPOTrainer)["_get_per_token_logps_and_entropies"]
takes = inspect.signature(method).parameters.keys()
missing = {"input_ids", "attention_mask", "logits_to_keep", "compute_entropy"} - takes
assert not missing, f"this example is for TRL 1.16: here GRPOTrainer.{method.__name__} has no {missing}"

torch.manual_seed(0)
vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *letters, "<unk>"])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1)).to(device)
ak.convert(model, fuse_loss=True)


class ExactTrainer(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, model, ids, mask, logits_to_keep, *_, **__):
        options = {"temperature": self.temperature, "logits_to_keep": logits_to_keep + 1}
        with torch.autocast(device, torch.float16):
            return *ak.nn.token_log_probs(model, ids, mask, entropy=True, **options), None


def reward(completions, **_):  # letters of the first half of the alphabet
    return [sum(letter in letters[:13] for letter in completion) / 8 for completion in completions]


with tempfile.TemporaryDirectory() as folder:
    steps = {"max_steps": 60, "num_iterations": 2, "per_device_train_batch_size": 4, "num_generations": 4}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": device == "cpu"}
    rates = {"lr_scheduler_type": "constant", "temperature": 0.9, "max_completion_length": 8, "logging_steps": 6}
    config = GRPOConfig(output_dir=folder, **steps, **quiet, **rates, bf16=False, fp16=False)
    prompts = table.InMemoryTable.from_pydict({"prompt": ["abc", "hello", "xyz", "qrs"] * 4})
    data = Dataset(prompts, fingerprint="letters")
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2, shadow_dtype=torch.float16)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    trainer = ExactTrainer(model, reward, config, data, processing_class=tokenizer, optimizers=(optimizer, None))
    scaler = trainer.accelerator.scaler = ak.GradScaler(device, init_scale=2.0**12)
    trainer.accelerator.unscale_gradients = lambda _=None: scaler.unscale_(optimizer)  # else not before the clipping
    trainer.train()
first, *_, last = (1 - entry["reward"] for entry in trainer.state.log_history if "reward" in entry)
print(f"distance {first:.2f} -> {last:.2f}")
