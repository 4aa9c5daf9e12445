"""Other connectors' settings as ours: AscendStore's, LMCache's, NIXL's and vLLM's own offloading, key by key.

One table a connector: what a key becomes, or why nothing here corresponds to it. Reads a `--kv-transfer-config`, its
extra part alone, a file of vLLM's settings that has one or a size to offload, or LMCache's YAML. Imports none of these
connectors.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from layercast.config import GIB, as_written, from_mapping
from layercast.connector.vllm import NAME
from layercast.doctor.checks import Check, Level
from layercast.errors import BadSetting


class Becomes(msgspec.Struct, frozen=True):
    """A key that has a counterpart. value: from their value to ours. but: what differs all the same."""

    key: str
    value: Callable[[Any], Any] = lambda value: value
    but: str = ""


Rule = Becomes | str
"""A counterpart, or why there is none."""

PORT = "lookups are made in the scheduler's own process; no port is needed"
RANKS = "KV is kept as each rank has it; engines that share a folder need the same parallel sizes"
BUFFERS = "layers do not share GPU buffers"
ROLE = "kv_role says it: kv_both loads and saves, kv_producer saves, kv_consumer loads"
WHOLE = "the pool keeps whole blocks only"
REMOTE = "there is no remote store yet; engines may share a folder (disk_path)"
PUSH = "vLLM instances do not push to one another yet; they may share a folder (disk_path)"
BLEND = "only prefixes are reused"
TRANSPORT = "no transport between instances is used"
CHUNKS = "a key names one block of vLLM's; set --block-size for other steps"
CHOSEN = "chosen for each hit, by what it would cost the requests beside it (layerwise_exposed_ms)"
SAVES = "what is computed is saved, in whole blocks, the first time"
EVICTION = "the blocks that were used least recently go first"
OF_ALL = "theirs is for all ranks together, ours for each: divide it"
TIERS = "host memory always, and a folder under it where disk_path names one"


def _alike(*names: str) -> dict[str, Rule]:
    """Keys that have the same name here."""
    return {name: Becomes(name) for name in names}


def _none(why: str, *names: str) -> dict[str, Rule]:
    """Keys that have no counterpart, for that reason."""
    return dict.fromkeys(names, why)


def _gib(number: Any) -> int:  # noqa: ANN401
    return int(float(number) * GIB)


ASCEND: Mapping[str, Rule] = {
    **_alike("use_layerwise", "layerwise_prefetch_layers", "layerwise_max_transfer_blocks"),
    **_alike("layerwise_max_transfer_bytes", "save_decode_cache", "h2d_stagger_us"),
    **_none(REMOTE, "backend"),
    **_none(PORT, "mooncake_rpc_port", "lookup_rpc_port"),
    **_none(WHOLE, "discard_partial_chunks"),
    **_none(BUFFERS, "layerwise_num_shared_buffers", "layerwise_independent_layers"),
    **_none(CHOSEN, "load_async"),
    **_none(ROLE, "consumer_is_to_put", "consumer_is_to_load"),
    **_none(RANKS, "prefill_tp_size", "decode_tp_size", "prefill_pp_size", "prefill_pp_layer_partition"),
}
LMCACHE: Mapping[str, Rule] = {
    **_alike("use_layerwise", "save_decode_cache"),
    "max_local_cpu_size": Becomes("host_bytes", _gib),
    "local_disk": Becomes("disk_path", lambda place: str(place).removeprefix("file://")),
    "max_local_disk_size": Becomes("disk_bytes", _gib),
    "min_retrieve_tokens": Becomes("kv_recompute_threshold"),
    **_none(CHUNKS, "chunk_size"),
    **_none("the pool is in host memory, always", "local_cpu"),
    **_none(WHOLE, "save_unfull_chunk", "discard_partial_chunks"),
    **_none(REMOTE, "remote_url", "remote_serde"),
    **_none(BLEND, "enable_blending", "blend_check_layers", "blend_recompute_ratios", "blend_thresholds"),
    **_none(BLEND, "blend_min_tokens", "blend_special_str"),
    **_none("every rank saves what it holds", "save_only_first_rank"),
    **_none(PUSH, "enable_pd", "enable_p2p"),
    **_none("there is no controller", "enable_controller"),
    **_none(PORT, "lmcache_rpc_port"),
    **_none("LMCache's server has a size of its own; ours is host_bytes", "kv_offloading_size"),
}
NIXL: Mapping[str, Rule] = {
    **_alike("kv_recompute_threshold"),
    **_none("no block waits on a GPU for another instance to fetch it", "kv_lease_duration"),
    **_none(PUSH, "push_registration_timeout", "bidirectional_kv_xfer", "decoder_kv_blocks_ttl"),
    **_none(TRANSPORT, "backends", "num_threads", "engine_ttl"),
    **_none("what differs in model, layout or dtype has other keys, and is never found", "enforce_handshake_compat"),
}
OFFLOADING: Mapping[str, Rule] = {
    **_alike("disk_path"),
    "cpu_bytes_to_use": Becomes("host_bytes", int, OF_ALL),
    "kv_offloading_size": Becomes("host_bytes", _gib, OF_ALL),
    "cpu_bytes_to_use_per_rank": Becomes("host_bytes", int),
    "disk_capacity_bytes": Becomes("disk_bytes", int),
    "offload_prompt_only": Becomes("save_decode_cache", lambda only: not only),
    **_none(CHUNKS, "block_size", "blocks_per_chunk"),
    **_none(RANKS, "canonical_layout"),
    **_none(CHOSEN, "sync_load_budget_bytes"),
    **_none(SAVES, "store_threshold", "max_tracker_size", "lazy_offload"),
    **_none(EVICTION, "eviction_policy", "cache_policy_module_path"),
    **_none(TIERS, "spec_name", "spec_module_path", "secondary_tiers", "backpressure", "kv_offload_backend"),
    **_none("files are written and read block by block", "disk_buffer_slots"),
    **_none("the system's page cache is used, always", "use_page_cache"),
    **_none("vLLM's --kv-events-config alone decides about events", "self_describing_kv_events"),
}
CONNECTORS: Mapping[str, Mapping[str, Rule]] = {
    "AscendStoreConnector": ASCEND,
    "MooncakeConnectorStoreV1": ASCEND,
    "LMCacheConnectorV1": LMCACHE,
    "LMCacheConnectorV1Dynamic": LMCACHE,
    "LMCacheMPConnector": LMCACHE,
    "NixlConnector": NIXL,
    "NixlPushConnector": NIXL,
    "OffloadingConnector": OFFLOADING,
    "SimpleCPUOffloadConnector": OFFLOADING,
}
OFFLOADED = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
"""The connector that vLLM takes for each kv_offloading_backend where kv_offloading_size is given, whatever else is."""
ROLES = ("kv_both", "kv_producer", "kv_consumer")
OF_THE_WHOLE = ("kv_role", "kv_load_failure_policy")
READ_HERE = ("kv_connector", *OF_THE_WHOLE, "kv_connector_extra_config")
MULTI = "MultiConnector"
NAME_FOLDER = "Name a folder that all of them see: --set disk_path=FOLDER"
TWO_SIDES = (
    "Start both sides with our connector, the same disk_path, model, --block-size, --max-model-len, parallel sizes and "
    'vLLM: "kv_role":"kv_producer" where prompts are computed, "kv_consumer" where answers are. The proxy may stay if '
    "it asks the first, then the second; what it passes on (remote_block_ids, remote_host) is not read, and what is "
    "not in the folder when a request comes is computed anew. VLLM_NIXL_* and kv_buffer_device have no effect."
)
NOT_READ = "left out; nothing here reads it"
TELLING: Mapping[str, Mapping[str, Rule]] = {
    "an LMCache file": LMCACHE,
    "AscendStore": ASCEND,
    "NIXL": NIXL,
    "vLLM's offloading": OFFLOADING,
}
"""Where no connector is named, the one that knows most of the keys is meant."""


class Translation(msgspec.Struct, frozen=True):
    """Our role and settings, and what became of each key."""

    role: str
    settings: dict[str, Any]
    checks: tuple[Check, ...]


def read(path: Path) -> dict[str, Any]:
    """The settings in a JSON or YAML file; of a file of vLLM's settings, the transfer config that vLLM makes of them.

    Raises BadSetting.
    """
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise BadSetting(f"{path}: there is no such file; name a JSON or YAML file of settings") from error
    except OSError as error:
        raise BadSetting(f"{path}: can't be read: {error.strerror}; name a JSON or YAML file of settings") from error
    except UnicodeDecodeError as error:
        raise BadSetting(f"{path} can't be read as text ({error}); name a JSON or YAML file of settings") from error
    found = _table(text, str(path))
    vllm = {key.replace("-", "_"): value for key, value in found.items()}
    size, inner = vllm.get("kv_offloading_size"), vllm.get("kv_transfer_config")
    where = f"{path}: its transfer config"
    if inner is not None:
        found = _table(inner, where) if isinstance(inner, str) else _of_table(inner, where)
    if size is None:
        return found
    backend = vllm.get("kv_offloading_backend") or "native"
    if backend not in OFFLOADED:
        raise BadSetting(f"{path}: kv_offloading_backend = {_shown(backend)}: known: {', '.join(OFFLOADED)}")
    whole = {} if inner is None else found
    extra = {**_extra(whole), "kv_offloading_size": size}
    return whole | {"kv_connector": OFFLOADED[backend], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _table(text: str, where: str) -> dict[str, Any]:
    """The table that a text is, in JSON or YAML."""
    import yaml  # here, since only this needs it

    try:
        return _of_table(json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text), where)
    except (ValueError, yaml.YAMLError) as error:
        raise BadSetting(f"{where} is neither valid JSON nor YAML ({' '.join(str(error).split())})") from error


def _of_table(found: object, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise BadSetting(f"{where} holds no table of settings; name a JSON or YAML file that does")
    return {str(key): value for key, value in found.items()}


def translate(theirs: Mapping[str, Any], told: Mapping[str, Any] = MappingProxyType({})) -> Translation:
    """Our settings for theirs, and what became of each key; those of several connectors come together.

    told: settings of ours that are given beside theirs, and win. Raises BadSetting for a connector that is not known
    here, and for values that ours can't take.
    """
    settings: dict[str, Any] = {}
    checks: list[Check] = []
    parts = _parts(theirs)
    for name, table, extra in parts:
        checks += [_translated(name, table, key, value, settings) for key, value in extra.items()]
    wins = "is given beside these settings, and wins"
    checks += [Check(key, Level.NOTE, f"{_written(key, told[key])} {wins}.") for key in told if key in settings]
    settings |= told
    from_mapping(settings, "translated settings")
    checks += [_apart(name, settings) for name, table, _ in parts if table is NIXL]
    checks += _left_out(theirs)
    role, policy = theirs.get("kv_role") or "kv_both", theirs.get("kv_load_failure_policy") or "fail"
    if role not in ROLES:
        raise BadSetting(f"kv_role = {_shown(role)}: known roles: {', '.join(ROLES)}")
    if role != "kv_both" and not settings.get("disk_path"):
        found = f"{role}: instances meet in a folder only, and none is named."
        checks.append(Check("kv_role", Level.ERROR, found, NAME_FOLDER))
    if policy != "recompute" and "kv_connector" in theirs:
        found = f"{policy} (vLLM's default): a request whose KV is lost would end in an error; recompute is put here."
        checks.append(Check("kv_load_failure_policy", Level.NOTE, found))
    return Translation(role, settings, tuple(checks))


def _apart(name: str, settings: Mapping[str, Any]) -> Check:
    """What a connector between instances does that nothing here does, and how to start the two sides instead."""
    found = f"{name} hands KV from the GPU of one instance to that of another. Nothing here does: what one has saved"
    if not settings.get("disk_path"):
        found = f"{found} another finds in a folder that both see, and none is named, so it would compute every prompt."
        return Check("kv_connector", Level.ERROR, found, f"{NAME_FOLDER}. {TWO_SIDES}")
    return Check("kv_connector", Level.WARNING, f"{found} another finds in disk_path.", TWO_SIDES)


def _parts(theirs: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Rule], Mapping[str, Any]]]:
    """(name, table, settings) of each connector that is meant."""
    name, extra = theirs.get("kv_connector"), _extra(theirs)
    if name == MULTI:
        return [part for child in _children(extra) if _known(child) for part in _parts(child)]
    if name is None:
        inner = theirs if "kv_connector_extra_config" not in theirs else extra
        if not inner:
            raise BadSetting("no settings are in it; name a file of AscendStore, LMCache, NIXL or offloading settings")
        name, table = max(TELLING.items(), key=lambda item: len({_plain(key) for key in inner} & set(item[1])))
        if not {_plain(key) for key in inner} & set(table):
            raise BadSetting(
                f"{', '.join(inner)}: no setting of {', '.join(TELLING)} that is known here is among these"
            )
        return [(name, table, inner)]
    if name == NAME:
        raise BadSetting(
            f"{NAME}: these are layercast's own already; layercast doctor --vllm MODEL --set ... checks them"
        )
    if name not in CONNECTORS:
        known = ", ".join(CONNECTORS)
        raise BadSetting(f"{name}: its settings are not known here; known: {known}, and {MULTI} of these")
    return [(name, CONNECTORS[name], extra)]


def _extra(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = theirs.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise BadSetting(f"kv_connector_extra_config = {_shown(extra)}: it should be a table of settings")
    return extra


def _children(extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The transfer configs that a MultiConnector holds."""
    children = extra.get("connectors")
    if not isinstance(children, list) or not all(isinstance(child, Mapping) for child in children):
        raise BadSetting(f"connectors = {_shown(children)}: it should be a list of tables of settings")
    return children


def _known(child: Mapping[str, Any]) -> bool:
    return child.get("kv_connector") in (MULTI, *CONNECTORS)


def _left_out(theirs: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> Iterator[Check]:
    """What stands beside the settings and is not carried over. whole: the transfer config whose child this is."""
    if "kv_connector_extra_config" in theirs or "kv_connector" in theirs:
        of = "" if whole is None else f"{theirs.get('kv_connector')}: "
        for key, value in theirs.items():
            if key not in READ_HERE:
                yield Check(key, Level.NOTE, f"{of}{_shown(value)}: {NOT_READ}.")
            elif whole is not None and key in OF_THE_WHOLE and value not in (None, whole.get(key)):
                yield Check(key, Level.NOTE, f"{of}{_shown(value)}: that of {MULTI} counts.")
    if theirs.get("kv_connector") != MULTI:
        return
    extra = _extra(theirs)
    yield from (Check(key, Level.NOTE, f"{_shown(extra[key])}: {NOT_READ}.") for key in extra if key != "connectors")
    for child in _children(extra):
        if not _known(child):
            found = f"{child.get('kv_connector')}: left out with all its settings, which are not known here."
            yield Check("kv_connector", Level.WARNING, found, "Look in its documentation what it would do.")
        else:
            yield from _left_out(child, theirs)


def _translated(name: str, table: Mapping[str, Rule], key: str, value: object, settings: dict[str, Any]) -> Check:
    """What becomes of one key; its counterpart goes into `settings`."""
    rule = table.get(_plain(key))
    if rule is None:
        advice = "Leave it out, and look in the documentation what it would do."
        return Check(key, Level.WARNING, f"Not known as a setting of {name}.", advice)
    if isinstance(rule, str):
        return Check(key, Level.NOTE, f"{_shown(value)}: no counterpart; {rule}.")
    if value is None:
        return Check(key, Level.OK, "null: left at our default.")
    before = settings.get(rule.key)
    try:
        settings[rule.key] = rule.value(value)
    except (TypeError, ValueError, OverflowError) as error:
        unit = " of GiB" if rule.value is _gib else ""
        raise BadSetting(f"{key} = {_shown(value)}: it should be a number{unit}") from error
    found = f"{_shown(value)} -> {rule.key} = {_written(rule.key, settings[rule.key])}"
    if rule.but:
        return Check(key, Level.NOTE, f"{found}; {rule.but}.")
    if before not in (None, settings[rule.key]):
        return Check(
            key,
            Level.NOTE,
            f"{found}, in place of {_written(rule.key, before)}, which another connector's setting gave.",
        )
    return Check(key, Level.OK, found)


def _plain(key: str) -> str:
    return key.removeprefix("lmcache.")


def _written(key: str, value: object) -> str:
    """A value of our setting."""
    return _shown(as_written({key: value})[key])


def _shown(value: object) -> str:
    return json.dumps(value, default=str)
