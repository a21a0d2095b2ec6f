"""Every format loads to the same model; every damaged checkpoint is refused with a text that helps."""

import json
import shutil
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from dense_context import GOLDEN_FOLDER, logits, relative_error, sharded_logits
from flax import nnx
from safetensors.numpy import load_file, save_file

from pensieve_jax.core.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from pensieve_jax.models import (
    checkpoint_fingerprint,
    convert_checkpoint,
    describe_checkpoint,
    load_model,
    loading,
)
from pensieve_jax.parallel import make_mesh

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of the small Llama checkpoint, to be damaged."""
    return copy_of("llama", tmp_path)


def copy_of(name, tmp_path):
    return Path(shutil.copytree(GOLDEN_FOLDER / name, tmp_path / name))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def write_shards(folder, num_shards=3):
    """Split the folder's only weight file as large checkpoints are split."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def golden_logits_error(path, name, **arguments):
    golden = np.load(GOLDEN_FOLDER / name / "golden.npz")
    return relative_error(logits(load_model(path, **arguments), golden["token_ids"]), golden["logits"])


# Formats


def test_sharded_safetensors(checkpoint):
    write_shards(checkpoint)
    assert golden_logits_error(checkpoint, "llama") < 1e-4


def test_checkpoint_of_the_bare_decoder(tmp_path):
    folder = copy_of("opt", tmp_path)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(folder, strip)
    assert golden_logits_error(folder, "opt") < 1e-4


def test_superfluous_copies_are_fine(tmp_path):
    folder = copy_of("llama3-tied", tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    change_tensors(folder, add)
    assert golden_logits_error(folder, "llama3-tied") < 1e-4


def test_dtype_is_that_of_the_configuration_then_of_the_weights(checkpoint):
    change_tensors(checkpoint, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    change_config(checkpoint, dtype=None)
    assert load_model(checkpoint).spec.dtype == ml_dtypes.bfloat16
    change_config(checkpoint, dtype=None, torch_dtype="float16")
    assert load_model(checkpoint, dtype="auto").spec.dtype == np.float16
    assert load_model(checkpoint, dtype="float32").spec.dtype == np.float32


def test_progress_counts_all_bytes(checkpoint):
    calls = []
    load_model(checkpoint, progress=lambda done, total: calls.append((done, total)))
    info = describe_checkpoint(checkpoint)
    assert calls[-1] == (info.size_bytes, info.size_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_several_threads_load_the_same(checkpoint, monkeypatch):
    """As beside a GPU, where one is slower than the link."""
    alone = load_model(checkpoint)
    monkeypatch.setattr(loading, "_num_threads", lambda: 4)
    calls = []
    together = load_model(checkpoint, progress=lambda done, total: calls.append((done, total)))
    for one, other in zip(*(jax.tree.leaves(nnx.state(model)) for model in (alone, together)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)

    def read(self, name):
        raise CheckpointError("a file vanished in a test")

    monkeypatch.setattr(loading.SafetensorsSource, "read", read)
    with pytest.raises(CheckpointError, match="vanished"):
        load_model(checkpoint)


GGUF_MODELS = {"llama": "llama", "llama3-tied": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def write_gguf(name: str, file: Path, quantisation=None, **extra) -> None:
    """What llama.cpp's converter makes of a golden checkpoint."""
    config = json.loads((GOLDEN_FOLDER / name / "config.json").read_text())
    arch = GGUF_MODELS[name]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    for key, value in extra.items():
        writer.add_float32(f"{arch}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for tensor_name, values in load_file(GOLDEN_FOLDER / name / WEIGHTS).items():
        if arch == "llama" and ("q_proj" in tensor_name or "k_proj" in tensor_name):
            n = heads if "q_proj" in tensor_name else kv_heads
            values = values.reshape(n, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if quantisation is not None and values.ndim > 1:
            packed = gguf.quants.quantize(values, quantisation)
            writer.add_tensor(gguf_name, packed, raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", llama_cpp_rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_rope_factors(config) -> np.ndarray:
    """The divisors of the frequencies that llama.cpp's converter stores for Llama 3.1 scaling."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    factors = []
    for frequency in 1 / config["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            smooth = (scaling["original_max_position_embeddings"] / wavelength - 1) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_gguf_equals_safetensors(name, tmp_path):
    write_gguf(name, tmp_path / "model.gguf")
    assert golden_logits_error(tmp_path / "model.gguf", name) < 1e-4
    assert golden_logits_error(tmp_path, name) < 1e-4  # a folder with only that file


def test_quantised_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf("llama", file, quantisation=gguf.GGMLQuantizationType.Q8_0)
    assert describe_checkpoint(file).dtype == np.float32
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(GOLDEN_FOLDER / "llama" / WEIGHTS)[name]
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    weight = load_model(file).layers[0].mlp.up_proj.weight[...]
    assert np.array_equal(weight, expected)
    assert golden_logits_error(file, "llama") < 0.2


def test_float16_gguf_is_float16(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf("llama", file, quantisation=gguf.GGMLQuantizationType.F16)
    assert load_model(file).spec.dtype == np.float16


@pytest.mark.parametrize("name", ["llama3-tied", "opt"])
def test_orbax_round_trip(name, tmp_path):
    convert_checkpoint(GOLDEN_FOLDER / name, tmp_path / "orbax")
    assert golden_logits_error(tmp_path / "orbax", name) < 1e-6 + golden_logits_error(
        GOLDEN_FOLDER / name, name
    )
    assert not list(tmp_path.glob("*.partial"))
    mesh = make_mesh(2)
    model = load_model(tmp_path / "orbax", mesh=mesh)
    weight = model.layers[0].self_attn.q_proj.weight[...]
    assert weight.addressable_shards[0].data.shape == (weight.shape[0] // 2, weight.shape[1])
    golden = np.load(GOLDEN_FOLDER / name / "golden.npz")
    assert relative_error(sharded_logits(model, golden["token_ids"], mesh), golden["logits"]) < 1e-4


def test_orbax_in_another_dtype(tmp_path):
    convert_checkpoint(GOLDEN_FOLDER / "llama", tmp_path / "orbax", dtype="bfloat16")
    assert load_model(tmp_path / "orbax").spec.dtype == ml_dtypes.bfloat16
    wide = load_model(tmp_path / "orbax", dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(wide))} == {np.dtype(np.float32)}


def test_orbax_of_another_model_is_refused(tmp_path):
    convert_checkpoint(GOLDEN_FOLDER / "llama", tmp_path / "orbax")
    change_config(tmp_path / "orbax", intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"has shape \[32, 64\], expected \[32, 40\]"):
        load_model(tmp_path / "orbax")
    change_config(tmp_path / "orbax", intermediate_size=64, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"missing parameter layers\.2"):
        load_model(tmp_path / "orbax")


def test_conversion_never_overwrites(checkpoint, tmp_path):
    with pytest.raises(InvalidArgumentError, match="not an empty folder"):
        convert_checkpoint(GOLDEN_FOLDER / "llama", checkpoint)


# Damage


def test_missing_path(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such file or folder"):
        load_model(tmp_path / "nowhere")


def test_folder_without_config(checkpoint):
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(checkpoint)


def test_config_that_is_not_json(checkpoint):
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        load_model(checkpoint)


def test_folder_without_weights(checkpoint):
    (checkpoint / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="no safetensors files"):
        load_model(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="convert pytorch_model"):
        load_model(checkpoint)


def test_missing_shard(checkpoint):
    write_shards(checkpoint)
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing model-00002-of-00003\.safetensors"):
        load_model(checkpoint)


def test_shard_without_its_tensor(checkpoint):
    write_shards(checkpoint)
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"
    (checkpoint / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00003.*lm_head\.weight is missing"):
        load_model(checkpoint)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.9])
def test_truncated_safetensors(checkpoint, kept):
    content = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        load_model(checkpoint)


@pytest.mark.parametrize("kept", [0.001, 0.9])
def test_truncated_gguf(tmp_path, kept):
    file = tmp_path / "model.gguf"
    write_gguf("llama", file)
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"model\.gguf: truncated"):
        load_model(file)


def test_missing_tensor(checkpoint):
    change_tensors(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(checkpoint)


def test_unexpected_tensor(checkpoint):
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(checkpoint, lambda tensors: tensors.update({name: np.ones(32, np.float32)}))
    with pytest.raises(CheckpointError, match=f"unexpected tensors {name}"):
        load_model(checkpoint)


def test_misshapen_tensor(checkpoint):
    change_tensors(
        checkpoint, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((32, 64), np.float32)})
    )
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \[32, 64\], expected \[64, 32\]"):
        load_model(checkpoint)


def test_tied_head_that_differs(tmp_path):
    folder = copy_of("llama3-tied", tmp_path)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load_model(folder)


def test_unknown_dtype(checkpoint):
    for dtype in ("int8", "float8", np.float64):
        with pytest.raises(InvalidArgumentError, match="dtype="):
            load_model(checkpoint, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "gpt_neox"}, "model_type='gpt_neox'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quant_method': 'gptq"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act='xielu'"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"sliding_window": 16}, "sliding_window=16"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types="),
        ("opt", {"activation_function": "tanh"}, "activation_function='tanh'"),
        ("opt", {"parallel_residual": True}, "parallel_residual=True"),
    ],
)
def test_other_mathematics_is_refused(name, changes, message, tmp_path):
    folder = copy_of(name, tmp_path)
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ],
)
def test_malformed_field(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


def test_gguf_with_other_mathematics(tmp_path):
    write_gguf("llama", tmp_path / "model.gguf", logit_scale=2.0)
    with pytest.raises(UnsupportedModelError, match=r"llama\.logit_scale=2\.0"):
        load_model(tmp_path / "model.gguf")


def test_gguf_of_another_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'falcon'"):
        load_model(tmp_path / "model.gguf")


# Identity


def test_fingerprint_follows_weights_and_configuration(checkpoint):
    first = checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(checkpoint) == first
    change_config(checkpoint, rope_theta=20_000.0)
    second = checkpoint_fingerprint(checkpoint)
    change_tensors(checkpoint, lambda tensors: tensors["model.norm.weight"].__setitem__(3, 2.0))
    assert len({first, second, checkpoint_fingerprint(checkpoint)}) == 3


def test_fingerprint_of_the_other_formats(tmp_path):
    write_gguf("llama", tmp_path / "model.gguf")
    convert_checkpoint(GOLDEN_FOLDER / "llama", tmp_path / "orbax")
    write_gguf("llama", tmp_path / "copy.gguf")
    paths = [tmp_path / "model.gguf", tmp_path / "orbax", GOLDEN_FOLDER / "llama"]
    assert len({checkpoint_fingerprint(path) for path in paths}) == 3


@pytest.mark.parametrize("name", ["llama3-tied", "opt-350m", "mistral"])
def test_description_equals_the_loaded_model(name):
    info, model = describe_checkpoint(GOLDEN_FOLDER / name), load_model(GOLDEN_FOLDER / name)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert info.num_parameters == sum(leaf.size for leaf in leaves)
    assert info.size_bytes == sum(leaf.nbytes for leaf in leaves)
    assert info.spec == model.spec
    assert info.spec.sliding_window == (7 if name == "mistral" else None)
