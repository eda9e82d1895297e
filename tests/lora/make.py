#!/usr/bin/env python3
"""Makes LoRA adapters for five tiny checkpoints of the parity tables, with the logits that PEFT computes with them.

    python3 tests/lora/make.py [NAME ...]                          # llama qwen3 gemma3 qwen3-moe phi3
    LLAMA_CPP=/path/to/llama.cpp python3 tests/lora/make.py [NAME ...]    # with the GGUF forms
    PARITY=/path/to/parity python3 tests/lora/make.py               # checkpoints elsewhere

Made with peft 0.21.2, transformers 5.24.0, torch 2.15.0 and safetensors 0.8.0; the GGUF forms with convert_lora_to_gguf.py of the
llama.cpp that the source package of llama-cpp-python 0.3.36 brings, which also needs sentencepiece.

Each folder has
  one, two        adapters as `save_pretrained` writes them: `one` of rank 4 on all matrices of the layers, `two` of rank 8 on the
                  queries and values alone, with `use_rslora` (and patterns for single modules: PATTERNS).
  golden.json     tokens, positions, and for each case its adapters with their scales and the tokens that follow greedily
                  (`same`: adapters in other forms that give the logits of a case)
  golden.safetensors   CASE.logits, f32 [positions, vocab]
  one.gguf, two.gguf   F32, for the families of GGUF. The format has one alpha and no mark for rslora or patterns: `two.gguf` is
                  another adapter than `two` (case `two-gguf`: alpha / rank everywhere).
qwen3-moe has three more adapters, which all change attention and experts:
  one-modules     the same adapter as `one`, with two matrices for each expert's module, as PEFT wrote it where experts were modules
                  (transformers 4). `one` is what PEFT makes of it: gate and up fused, so that their rank is 8.
  fused           made for the fused matrices themselves (`target_parameters`): rank 2, no zeros in B
  fused-old       the same adapter in the form of PEFT before 0.20, which took the middle dimension of the stacked experts as the
                  input: A and B change sides

Random numbers are rounded to bf16 and stored as f32. For each family the first seed counts whose least margins, of the best token
over the next and of the last chosen expert over the next, are large enough (MARGIN, ROUTER_MARGIN). All logits are compared with
those of weights to which the differences were added, read from the saved files by the formulas of `differences` alone. Two runs
write the same bytes. All of it takes three minutes on two cores.
"""

import json
import math
import os
import pathlib
import re
import runpy
import shutil
import sys
import warnings
import zlib

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
PARITY = pathlib.Path(os.environ.get("PARITY", HERE.parent / "parity"))
LLAMA_CPP = os.environ.get("LLAMA_CPP")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERT = ["gate_proj", "up_proj", "down_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = ["llama", "qwen3", "gemma3", "qwen3-moe", "phi3"]
FUSED_NAMES = {"phi3": (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["qkv_proj"])}
GGUF = ["llama", "qwen3", "qwen3-moe"]
# Patterns of `two`.
PATTERNS = {
    "llama": dict(alpha_pattern={"layers.1.self_attn.q_proj": 4}),
    "gemma3": dict(rank_pattern={"layers.3.self_attn.v_proj": 3}),
}
# Gemma 3's window is 32 tokens.
LENGTHS = {"gemma3": 40}
NEW_TOKENS = 8
MARGIN, ROUTER_MARGIN = 0.01, 2e-4
STRENGTH = 0.35
EOS = 1

CASES = {
    "base": [], "one": [("one", 1.0)], "one-half": [("one", 0.5)], "two": [("two", 1.0)],
    "both": [("one", 1.0), ("two", 0.25)],
}
ONE = dict(r=4, lora_alpha=8)
TWO = dict(r=8, lora_alpha=16, use_rslora=True)
OVER_EXPERTS = dict(r=2, lora_alpha=6)
# What PEFT 0.17 wrote; it named no version.
MODULES_CONFIG = dict(
    alpha_pattern={}, auto_mapping=None, bias="none", corda_config=None, eva_config=None, exclude_modules=None,
    fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, layer_replication=None, layers_pattern=None,
    layers_to_transform=None, loftq_config={}, lora_bias=False, lora_dropout=0.0, megatron_config=None,
    megatron_core="megatron.core", modules_to_save=None, peft_type="LORA", qalora_group_size=16, rank_pattern={},
    revision=None, target_parameters=None, task_type="CAUSAL_LM", trainable_token_indices=None, use_dora=False,
    use_qalora=False, use_rslora=False,
)


def base_model(name, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(PARITY / name, attn_implementation="eager", dtype=dtype).eval()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    model.name_or_path = name  # which configs of adapters then name, not a path
    return model


def drawn(seed, key, shape, fan_in, scaling, rank):
    """A matrix of an adapter: A as large as a weight, B so that the difference has STRENGTH times the size of a weight."""
    numbers = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    size = 1 / math.sqrt(fan_in) if ".lora_A." in key else STRENGTH / (scaling * math.sqrt(rank))
    return (torch.randn(shape, generator=numbers) * size).bfloat16().float()


def fill(model, adapter, seed):
    for name, module in model.named_modules():
        if adapter in getattr(module, "lora_A", {}):
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            config = model.peft_config[adapter]
            scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
            for part, weight in [("lora_A", a), ("lora_B", b)]:
                weight.data = drawn(seed, f"{adapter}/{name}.{part}.", weight.shape, a.shape[1], scaling, config.r)


def write_config(folder, config):
    """Sorts what PEFT keeps as sets, so that every run writes the same."""
    for key in ["target_modules", "target_parameters"]:
        if config.get(key):
            config[key] = sorted(config[key])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(model, adapter, into):
    model.save_pretrained(into, selected_adapters=[adapter], save_embedding_layers=False)
    if (into / adapter).is_dir():
        for file in (into / adapter).iterdir():
            file.rename(into / file.name)
        (into / adapter).rmdir()
    (into / "README.md").unlink(missing_ok=True)
    write_config(into, json.loads((into / "adapter_config.json").read_text()))


def make_adapter(name, adapter, into, seed, **config):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", **config)
    model = get_peft_model(base_model(name), config, adapter_name=adapter)
    fill(model, adapter, seed)
    save(model, adapter, into / adapter)


def write_modules(name, into, seed):
    """`one-modules`: one pair of matrices for each matrix of each expert, and what its config was."""
    config = json.loads((PARITY / name / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {f"self_attn.{part}": shape for part, shape in zip(
        ATTENTION, [(wide, hidden), (narrow, hidden), (narrow, hidden), (hidden, wide)]
    )}
    for expert in range(config["num_local_experts"]):
        shapes |= {f"mlp.experts.{expert}.{part}": shape for part, shape in zip(
            EXPERT, [(inner, hidden), (inner, hidden), (hidden, inner)]
        )}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, (rows, columns) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{part}"
            for side, shape in [("lora_A", (ONE["r"], columns)), ("lora_B", (rows, ONE["r"]))]:
                full = f"{key}.{side}.weight"
                tensors[full] = drawn(seed, full, shape, columns, ONE["lora_alpha"] / ONE["r"], ONE["r"])
    into.mkdir(parents=True, exist_ok=True)
    save_file(tensors, into / "adapter_model.safetensors", metadata=dict(format="pt"))
    write_config(into, MODULES_CONFIG | ONE | dict(base_model_name_or_path=name, target_modules=ATTENTION + EXPERT))


def turned(rank, experts, tensor, is_a):
    """A matrix of stacked experts for the other side: rows `expert * rank + i` of A are columns `i * experts + expert` of B."""
    if is_a:
        return tensor.reshape(experts, rank, -1).permute(2, 1, 0).reshape(-1, rank * experts).contiguous()
    return tensor.reshape(-1, rank, experts).permute(2, 1, 0).reshape(experts * rank, -1).contiguous()


def write_old(source, into):
    """The form of PEFT 0.17 to 0.19 for experts stacked as `[expert, out, in]`."""
    config = json.loads((source / "adapter_config.json").read_text())
    into.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, tensor in load_file(source / "adapter_model.safetensors").items():
        if ".mlp.experts." in key:
            is_a = ".lora_A." in key
            tensor = turned(config["r"], 8, tensor, is_a)
            key = key.replace(".lora_A.", ".lora_B.") if is_a else key.replace(".lora_B.", ".lora_A.")
        tensors[key] = tensor
    save_file(tensors, into / "adapter_model.safetensors", metadata=dict(format="pt"))
    write_config(into, config | dict(peft_version="0.18.1"))


def pattern_of(patterns, module, default):
    return next((value for key, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{key})", module)), default)


def differences(folder, state):
    """What an adapter at scale 1 adds to each weight of a state dict, from its two files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {key: tensor.double() for key, tensor in load_file(folder / "adapter_model.safetensors").items()}
    found = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        b, module = tensors[key.replace("lora_A", "lora_B")], key.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
        # A module's parameters are wrapped one around another in the order in which it has them: the first is the innermost.
        stacked = module.endswith((".mlp.experts", ".mlp.experts.base_layer"))
        if stacked:
            module = module.removesuffix(".base_layer") + (".gate_up_proj" if module.endswith("base_layer") else ".down_proj")
        rank = pattern_of(config["rank_pattern"], module, config["r"])
        alpha = pattern_of(config["alpha_pattern"], module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", module)
        if stacked:
            weight = state[module]
            experts, rows, _ = weight.shape
            a, b = a.reshape(experts, rank, -1), b.reshape(-1, rank, experts).permute(2, 0, 1)
            if config.get("peft_version") == "0.18.1":
                a, b = a.transpose(1, 2), b.transpose(1, 2)
                added = a @ b
            else:
                added = b @ a
            assert added.shape == weight.shape, (module, added.shape, weight.shape)
            found[module] = scaling * added
        elif expert:
            stack, number, part = expert.groups()
            target = f"{stack}.down_proj" if part == "down_proj" else f"{stack}.gate_up_proj"
            weight = found.setdefault(target, torch.zeros_like(state[target], dtype=torch.float64))[int(number)]
            half = len(weight) // 2
            rows = {"gate_proj": weight[:half], "up_proj": weight[half:], "down_proj": weight}[part]
            rows += scaling * (b @ a)
        else:
            assert len(a) == rank, module
            found[f"{module}.weight"] = scaling * (b @ a)
    return found


def merged(name, into, adapters, dtype):
    model = base_model(name, dtype)
    state = model.state_dict()
    with torch.no_grad():
        for adapter, scale in adapters:
            for key, added in differences(into / adapter, state).items():
                state[key] += (scale * added).to(dtype)
    return model


def active(model, adapters, scalings):
    """Switches a PEFT model to some adapters at their scales."""
    if not adapters:
        return model.disable_adapter()
    model.base_model.set_adapter([adapter for adapter, _ in adapters])
    for module, stored in scalings.items():
        for adapter, scale in adapters:
            if adapter in stored:
                module.scaling[adapter] = stored[adapter] * scale
    return torch.no_grad()


def run(model, tokens, positions):
    """Logits, tokens that follow, and the least margins of tokens and of experts."""
    gaps = [math.inf]

    def watch(module, _, output):
        best = output[0].softmax(-1).topk(module.top_k + 1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))

    hooks = [module.register_forward_hook(watch) for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0][positions].contiguous()
        greedy, margins = [], []
        for _ in range(NEW_TOKENS):
            last = model(input_ids=torch.tensor([tokens + greedy]), use_cache=False).logits[0, -1]
            best, second = last.topk(2).values.tolist()
            margins.append(best - second)
            greedy.append(int(last.argmax()))
    for hook in hooks:
        hook.remove()
    return logits, greedy, min(margins), min(gaps)


def write_adapters(name, into, seed):
    everything, some = FUSED_NAMES.get(name, (ATTENTION + EXPERT, ["q_proj", "v_proj"]))
    if name == "qwen3-moe":
        write_modules(name, into / "one-modules", seed)
        # A plain load turns the config and the tensors into today's form.
        model = PeftModel.from_pretrained(base_model(name), into / "one-modules", adapter_name="one")
        save(model, "one", into / "one")
        make_adapter(name, "fused", into, seed, target_modules=ATTENTION, target_parameters=STACKS, **OVER_EXPERTS)
        write_old(into / "fused", into / "fused-old")
    else:
        make_adapter(name, "one", into, seed, target_modules=everything, **ONE)
    make_adapter(name, "two", into, seed, target_modules=some, **TWO, **PATTERNS.get(name, {}))


def make(name, into):
    stored = json.loads((PARITY / name / "golden.json").read_text())["prompts"]["medium"]["tokens"]
    length = LENGTHS.get(name, 12)
    tokens = stored[:length]
    positions = [length // 4, length // 2, 3 * length // 4, length - 1]
    cases = dict(CASES)
    if name == "qwen3-moe":
        cases["fused"] = [("fused", 1.0)]
    if name in GGUF:
        cases["two-gguf"] = [("two.gguf", 1.0)]
    for seed in range(1000):
        shutil.rmtree(into, ignore_errors=True)
        write_adapters(name, into, seed)
        model = PeftModel.from_pretrained(base_model(name), into / "one", adapter_name="one")
        model.load_adapter(into / "two", adapter_name="two")
        scalings = {module: dict(module.scaling) for module in model.modules() if hasattr(module, "lora_A")}
        results = {}
        for case, adapters in cases.items():
            if case == "fused":
                other = PeftModel.from_pretrained(base_model(name), into / "fused", adapter_name="fused")
                results[case] = run(other, tokens, positions)
            elif case == "two-gguf":
                for module, scaling in scalings.items():
                    if "two" in scaling:
                        module.scaling["two"] = TWO["lora_alpha"] / TWO["r"]
                model.base_model.set_adapter(["two"])
                results[case] = run(model, tokens, positions)
            else:
                with active(model, adapters, scalings):
                    results[case] = run(model, tokens, positions)
            _, greedy, margin, gap = results[case]
            if case != "base" and (margin < MARGIN or gap < ROUTER_MARGIN or EOS in greedy):
                break
        else:
            break
    print(f"{name}: seed {seed}")
    tensors, report = {}, dict(
        base=name, peft=peft.__version__, transformers=transformers.__version__, torch=torch.__version__, dtype="float32",
        seed=seed, tokens=tokens, positions=positions, cases={},
    )
    for case, (logits, greedy, margin, gap) in results.items():
        change = float((logits - results["base"][0]).abs().mean())
        report["cases"][case] = dict(
            adapters=[dict(name=adapter, scale=scale) for adapter, scale in cases[case]], greedy=greedy,
            greedy_margin_min=margin, mean_change=change,
        )
        tensors[f"{case}.logits"] = logits
        line = f"  {case:9} changed by {change:.3f}, largest {logits.abs().max():.1f}, margin {margin:.3f}, experts {gap:.1e}"
        if case != "two-gguf":
            for dtype in [torch.float32, torch.float64]:
                other = run(merged(name, into, cases[case], dtype), tokens, positions)
                worst = float((other[0] - logits).abs().max())
                assert worst < 1e-4 and other[1] == greedy, (case, worst)
                line += f", {str(dtype)[6:]} {worst:.1e}"
        print(line)
    if name == "qwen3-moe":
        report["same"] = {"one-modules": "one", "fused-old": "fused"}
        for other, case in report["same"].items():
            logits = run(merged(name, into, [(other, 1.0)], torch.float64), tokens, positions)[0]
            worst = float((logits - results[case][0]).abs().max())
            assert worst < 1e-4, (other, worst)
            print(f"  {other} as {case}: {worst:.1e}")
        model = PeftModel.from_pretrained(base_model(name), into / "one-modules")
        assert torch.equal(run(model, tokens, positions)[0], results["one"][0])
    if name in GGUF:
        report.setdefault("same", {})["one.gguf"] = "one"
    save_file(tensors, into / "golden.safetensors")
    text = json.dumps(report, indent=1)
    # Lists of numbers, and adapters, on one line.
    text = re.sub(r"\[[\s\d,]+\]|\{\s+\"name\"[^}]*\}", lambda found: " ".join(found[0].split()), text)
    (into / "golden.json").write_text(text + "\n")


def write_gguf(name, into):
    sys.path[:0] = [LLAMA_CPP, str(pathlib.Path(LLAMA_CPP) / "gguf-py")]
    for adapter in ["one", "two"]:
        # Stacked experts have no names that the converter knows: it takes the form with modules.
        folder = into / ("one-modules" if (name, adapter) == ("qwen3-moe", "one") else adapter)
        sys.argv = [
            "convert_lora_to_gguf.py", str(folder), "--base", str(PARITY / name), "--outtype", "f32", "--outfile",
            str(into / f"{adapter}.gguf"),
        ]
        runpy.run_path(str(pathlib.Path(LLAMA_CPP) / "convert_lora_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or FAMILIES:
        make(name, HERE / name)
    for name in sys.argv[1:] or FAMILIES:
        if LLAMA_CPP and name in GGUF:
            write_gguf(name, HERE / name)
