"""Ways to break a valid file: its bytes, its JSON, its graph, its header, each chosen by a strategy of hypothesis."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import onnx
from hypothesis import strategies as st

__all__ = ["ATTACKS", "mutated"]

Draw = Callable[[st.SearchStrategy[Any]], Any]

_PATHS = ["/etc/passwd", "../../../../etc/passwd", "..", "", "a\0b", "/dev/zero", "~", "model.onnx.data/../../x"]
_TEXTS = [*_PATHS, "\ud800", "\x1b[2J", "x" * 100_000, "$(id)", "__import__('os').system('id')", "org/repository"]
_NUMBERS = [0, 1, -1, 2, 7, 2**16, 2**31 - 1, 2**31, -(2**31), 2**63, 10**9, 10**30, 0.5, -0.0, 1e308, 1e-308]
_SPECIAL = [float("nan"), float("inf"), float("-inf"), None, True, False]
_EMPTY: list[Any] = [[], {}, [[]], [None], {"": None}]

_VALUE = st.one_of(
    st.sampled_from(_NUMBERS),
    st.sampled_from(_SPECIAL),
    st.sampled_from(_TEXTS),
    st.sampled_from(_EMPTY),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-3, 5000), max_size=5),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all entries; of large lists and objects, the first ones."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    found = [(*path, key) for key, _ in items[:60]]
    for key, inner in items[:60]:
        found += _places(inner, (*path, key))
    return found


def mutated_json(draw: Draw, content: bytes) -> bytes:
    """Change entries of a JSON file, or its text."""
    value = json.loads(content)
    for _ in range(draw(st.integers(0, 4))):
        places = _places(value)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        holder = value
        for key in way:
            holder = holder[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "wrap"]))
        if kind == "replace":
            holder[last] = copy.deepcopy(draw(_VALUE))  # later changes may be inside it
        elif kind == "remove":
            del holder[last]
        elif kind == "wrap":
            holder[last] = [holder[last]] * draw(st.sampled_from([1, 2, 1000]))
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(_TEXTS))] = copy.deepcopy(draw(_VALUE))
    text = json.dumps(value)
    kind = draw(st.sampled_from(["same"] * 8 + ["twice", "nested", "digits", "bytes"]))
    if kind == "twice" and text.startswith("{"):
        text = '{"_class_name": 1, "_class_name": null, ' + text[1:] if len(text) > 2 else text
    elif kind == "nested":
        text = draw(st.sampled_from(['{"a":' * 100_000, "[" * 1_000_000, text.replace("null", "[" * 900 + "]" * 900)]))
    elif kind == "digits":
        text = text.replace("1", "1" * draw(st.sampled_from([300, 5000])), 1)
    data = text.encode("utf-8", "surrogatepass")
    return mutated_bytes(draw, data) if kind == "bytes" else data


def mutated_bytes(draw: Draw, content: bytes) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "repeat", "insert", "remove"]))
        if kind == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and data:
            data[place] = draw(st.sampled_from([0, 0x7F, 0x80, 0xFF]))
        elif kind == "cut":
            del data[place:]
        elif kind == "repeat":
            data[place:place] = data[place : place + draw(st.integers(1, 2000))]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=20))
        else:
            del data[place : place + draw(st.integers(1, 2000))]
    return bytes(data)


_SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 320, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
_DATA = {
    "location": st.sampled_from([*_PATHS, "model.onnx", "*/_ORT_MEM_ADDR_/*", "./model.onnx.data"]),
    "offset": st.sampled_from(["0", "-1", "1", "4096", "9" * 18, "9" * 5000, "0x10", " 8", "\u0661", "", "1e3"]),
    "length": st.sampled_from(["0", "-1", "1", "4", "9" * 18, "9" * 5000, "4.0", ""]),
}  # fmt: skip


def mutated_graph(draw: Draw, content: bytes) -> bytes:
    """Change a graph: its tensors, nodes, sizes and versions; or the bytes of it."""
    if draw(st.integers(0, 3)) == 0:
        return mutated_bytes(draw, content)
    model = onnx.load_from_string(content)
    for _ in range(draw(st.integers(1, 4))):
        draw(st.sampled_from(_GRAPH_CHANGES))(draw, model)
    changed: bytes = model.SerializeToString()
    return changed


def _change_tensor(draw: Draw, model: onnx.ModelProto) -> None:
    tensor = draw(st.sampled_from(list(model.graph.initializer)))
    kind = draw(st.sampled_from(["dims", "type", "data", "raw", "name", "rank"]))
    if kind == "dims" and tensor.dims:
        tensor.dims[draw(st.integers(0, len(tensor.dims) - 1))] = draw(_SIZES)
    elif kind == "rank":
        tensor.dims.extend([draw(_SIZES)] * draw(st.sampled_from([1, 2, 1000])))
    elif kind == "type":
        tensor.data_type = draw(st.integers(-1, 30))
    elif kind == "data":
        key = draw(st.sampled_from(sorted(_DATA)))
        kept = [entry for entry in tensor.external_data if entry.key != key]
        del tensor.external_data[:]
        tensor.external_data.extend(kept)
        tensor.external_data.add(key=key, value=draw(_DATA[key]))
        tensor.data_location = onnx.TensorProto.EXTERNAL
    elif kind == "raw":
        tensor.raw_data = b"\xff" * draw(st.sampled_from([0, 1, 4, 10**6]))
    else:
        tensor.name = draw(st.sampled_from(["", "\0", "x" * 10_000, model.graph.input[0].name]))


def _change_node(draw: Draw, model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    if not nodes:
        return
    node, other = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
    kind = draw(st.sampled_from(["type", "input", "output", "domain", "remove", "attribute", "drop", "swap"]))
    if kind == "type":
        node.op_type = draw(st.sampled_from([other.op_type, "Loop", "Scan", "If", "Tile", "Expand", "Range", "", "\0"]))
    elif kind == "input" and node.input:
        node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from([*other.output, *other.input, ""]))
    elif kind == "output" and node.output:
        node.output[0] = draw(st.sampled_from([*other.output, *node.input, ""]))
    elif kind == "domain":
        node.domain = draw(st.sampled_from(["com.microsoft", "ai.onnx.ml", "evil", "\ud7ff"]))
    elif kind == "remove":
        model.graph.node.remove(node)
    elif kind == "drop" and node.input:
        del node.input[-1]
    elif kind == "swap":
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        node.CopyFrom(other)
        other.CopyFrom(copy)
    elif node.attribute:
        attribute = draw(st.sampled_from(list(node.attribute)))
        if attribute.ints:
            attribute.ints[draw(st.integers(0, len(attribute.ints) - 1))] = draw(_SIZES)
        attribute.i = draw(_SIZES)
        attribute.f = draw(st.floats(width=32))


def _change_sizes(draw: Draw, model: onnx.ModelProto) -> None:
    value = draw(st.sampled_from([*model.graph.input, *model.graph.output, *list(model.graph.value_info)[:50]]))
    shape = value.type.tensor_type.shape
    name = st.sampled_from(
        ["batch_size", "height/0", "2**2**2**30", "(a+b)**60", "a" * 10_000, "-1", "height", "\0", "("]
    )
    if shape.dim and draw(st.booleans()):
        dim = draw(st.sampled_from(list(shape.dim)))
        if draw(st.booleans()):
            dim.dim_value = draw(_SIZES)
        else:
            dim.dim_param = draw(name)
    elif draw(st.booleans()):
        value.type.tensor_type.elem_type = draw(st.integers(-1, 30))
    else:
        shape.dim.add(dim_value=draw(_SIZES))


def _change_versions(draw: Draw, model: onnx.ModelProto) -> None:
    if draw(st.booleans()):
        model.ir_version = draw(st.sampled_from([0, 3, 13, 99, 2**40, -1]))
    else:
        model.opset_import.add(domain=draw(st.sampled_from(["", "ai.onnx", "evil"])), version=draw(_SIZES))


_GRAPH_CHANGES = [_change_tensor, _change_node, _change_node, _change_sizes, _change_versions]


def mutated_safetensors(draw: Draw, content: bytes) -> bytes:
    """Change the header of a safetensors file: its length, or its JSON."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = draw(st.sampled_from(["length", "header", "header", "header", "bytes", "offsets"]))
    if kind == "length":
        claimed: int = draw(st.sampled_from([0, 1, length - 1, 2**31, 2**63, 2**64 - 1]))
        return claimed.to_bytes(8, "little") + content[8:]
    if kind == "bytes":
        return mutated_bytes(draw, content)
    if kind == "offsets":
        value = json.loads(header)
        for name in draw(st.lists(st.sampled_from(sorted(value.keys() - {"__metadata__"})), min_size=1, max_size=3)):
            offsets = draw(st.sampled_from([[0, 0], [5, 1], [-4, 4], [0, 2**62], [2**63, 2**64], [0], "0"]))
            value[name]["data_offsets"] = offsets
            if draw(st.booleans()):
                value[name]["shape"] = draw(st.lists(_SIZES, max_size=4))
            if draw(st.booleans()):
                value[name]["dtype"] = draw(st.sampled_from(["F32", "F64", "BOOL", "F8_E4M3", "Q4", "", None]))
        changed = json.dumps(value).encode()
    else:
        changed = mutated_json(draw, header)
    return len(changed).to_bytes(8, "little") + changed + data


@st.composite
def mutated(draw: Draw, file: str, content: bytes) -> bytes:
    """Draw the new bytes of a file with the given content."""
    if file.endswith(".json"):
        return mutated_json(draw, content)
    if file.endswith(".onnx"):
        return mutated_graph(draw, content)
    if file.endswith(".safetensors"):
        return mutated_safetensors(draw, content)
    return mutated_bytes(draw, content)


# Malicious content


def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def attack(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return attack


def _split(expression: str) -> Callable[[bytes], bytes]:
    splitting = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return _tokenizer(lambda value: value.update(pre_tokenizer=splitting))


def _normalizing(pattern: dict[str, str], content: str, times: int) -> Callable[[bytes], bytes]:
    replacing = {"type": "Replace", "pattern": pattern, "content": content}
    normalizer = {"type": "Sequence", "normalizers": [replacing] * times}
    return _tokenizer(lambda value: value.update(normalizer=normalizer))


_MISSING = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "?", "type_id": 0}}], "pair": []}
_PADDING = {
    "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "",
}  # fmt: skip


def _graph(change: Callable[[onnx.ModelProto], None]) -> Callable[[bytes], bytes]:
    def attack(content: bytes) -> bytes:
        model = onnx.load_from_string(content)
        change(model)
        changed: bytes = model.SerializeToString()
        return changed

    return attack


def _laughs(model: onnx.ModelProto) -> None:
    """Functions that each call the next one ten times."""
    for level in range(20):
        function = model.functions.add(name=f"f{level}", domain="evil", input=["x"], output=["y"])
        function.opset_import.add(domain="", version=23)
        function.opset_import.add(domain="evil", version=1)
        for call in range(10):
            domain, name = ("evil", f"f{level + 1}") if level < 19 else ("", "Neg")
            source, target = ("x" if not call else f"v{call}"), ("y" if call == 9 else f"v{call + 1}")
            function.node.add(op_type=name, domain=domain, input=[source], output=[target])
    _call(model)


def _recursion(model: onnx.ModelProto) -> None:
    function = model.functions.add(name="f0", domain="evil", input=["x"], output=["y"])
    function.opset_import.add(domain="evil", version=1)
    function.node.add(op_type="f0", domain="evil", input=["x"], output=["y"])
    _call(model)


def _call(model: onnx.ModelProto) -> None:
    model.opset_import.add(domain="evil", version=1)
    model.graph.node[-1].output[0] = "before"
    model.graph.node.add(op_type="f0", domain="evil", input=["before"], output=[model.graph.output[0].name])


def _nested(model: onnx.ModelProto) -> None:
    """Subgraphs in subgraphs, as deep as a file can hold them."""
    inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value_float=1.0)], "g", [], [])
    inner.output.add(name="y")
    for _ in range(25):
        node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        if node.ByteSize() > 1 << 22:
            break
        inner = onnx.helper.make_graph([node], "g", [], [])
        inner.output.add(name="y")
    model.graph.initializer.append(onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [True]))
    model.graph.node.insert(0, onnx.helper.make_node("If", ["c"], ["unused"], then_branch=inner, else_branch=inner))


def _filled(op_type: str) -> Callable[[onnx.ModelProto], None]:
    """A terabyte that is computed of constants."""

    def change(model: onnx.ModelProto) -> None:
        shape = onnx.helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [10**6, 10**6])
        one = onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [1, 1], [1.0])
        numbers = [onnx.helper.make_tensor(f"n{n}", onnx.TensorProto.FLOAT, [], [n]) for n in (0.0, 1e12, 1.0)]
        model.graph.initializer.extend([shape, one, *numbers])
        inputs = {
            "ConstantOfShape": ["shape"], "Expand": ["one", "shape"], "Tile": ["one", "shape"],
            "Range": ["n0.0", "n1000000000000.0", "n1.0"],
        }[op_type]  # fmt: skip
        model.graph.node.insert(0, onnx.helper.make_node(op_type, inputs, ["huge"]))
        model.graph.node.insert(1, onnx.helper.make_node("ReduceMax", ["huge"], ["largest"], keepdims=0))
        last = model.graph.node[-1]
        name, last.output[0] = last.output[0], "before"
        model.graph.node.append(onnx.helper.make_node("Add", ["before", "largest"], [name]))

    return change


def _sized(name: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = name

    return change


def _scopes(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="[" * 200_000)


def _configured(**changes: Any) -> Callable[[bytes], bytes]:
    return _tokenizer(lambda value: value.update(changes))


ATTACKS: list[tuple[str, str, str, Callable[[bytes], bytes]]] = [
    ("tokenizer", "tokenizer/tokenizer.json", "backtracking", _split("(a+)+$")),
    ("tokenizer", "tokenizer/tokenizer.json", "alternatives", _split("(a|aa)+$")),
    ("tokenizer", "tokenizer/tokenizer.json", "repeated", _split("(((a{1,1000}){1,1000}){1,1000}){1,100}")),
    ("tokenizer", "tokenizer/tokenizer.json", "growing", _normalizing({"String": "a"}, "a" * 10, 12)),
    ("tokenizer", "tokenizer/tokenizer.json", "between", _normalizing({"String": ""}, "a" * 1000, 3)),
    ("tokenizer", "tokenizer/tokenizer.json", "panic", _tokenizer(lambda v: v.update(post_processor=_MISSING))),
    ("tokenizer", "tokenizer/tokenizer.json", "padding", _tokenizer(lambda v: v.update(padding=_PADDING))),
    ("tokenizer's configuration", "tokenizer/tokenizer_config.json", "long", _configured(model_max_length=10**12)),
    ("graph", "vae_decoder/model.onnx", "billion laughs", _graph(_laughs)),
    ("graph", "vae_decoder/model.onnx", "recursion", _graph(_recursion)),
    ("graph", "vae_decoder/model.onnx", "nested", _graph(_nested)),
    ("graph", "vae_decoder/model.onnx", "scopes", _graph(_scopes)),
    *(
        ("graph", "vae_decoder/model.onnx", f"terabyte of {op_type}", _graph(_filled(op_type)))
        for op_type in ("ConstantOfShape", "Expand", "Tile", "Range")
    ),
    *(
        ("graph", "vae_decoder/model.onnx", f"size {name:.10}", _graph(_sized(name)))
        for name in ("2**2**2**30", "(a+b+c+d+e)**60", "(a+b)*" * 30 + "c", "(" * 5000, "(a+1)**9999999")
    ),
    ("configuration of a text encoder", "text_encoder/config.json", "layers", _configured(num_hidden_layers=10**9)),
    (
        "configuration of a text encoder", "text_encoder/config.json", "positions",
        _configured(max_position_embeddings=10**12),
    ),
    ("configuration of a UNet", "unet/config.json", "layers", _configured(layers_per_block=10**9)),
    ("configuration of a UNet", "unet/config.json", "depth", _configured(transformer_layers_per_block=10**9)),
    ("configuration of a UNet", "unet/config.json", "size", _configured(sample_size=10**9)),
    ("configuration of a UNet", "unet/config.json", "class", _configured(_class_name="../evil")),
    (
        "configuration of a text encoder", "text_encoder/config.json", "code",
        _configured(auto_map={"AutoConfig": "evil.Evil"}, attn_implementation="org/kernel", trust_remote_code=True),
    ),
    ("scheduler", "scheduler/scheduler_config.json", "timesteps", _configured(num_train_timesteps=10**12)),
    ("scheduler", "scheduler/scheduler_config.json", "class", _configured(_class_name={})),
    ("report", "sdonnx.json", "provider", _configured(provider="../x")),
]  # fmt: skip
