"""Keys of kv_connector_extra_config that only vLLM's other connectors read.

Users reuse configurations across connectors, and vLLM's connectors ignore unknown keys. This one
ignores a key only if another connector of vLLM 0.30 to 0.33 reads it: any other unknown key is an
error. tests/test_drop_in.py compares this list with the installed vLLM's source.
"""

from collections.abc import Iterable

_BY_CONNECTOR = {
    "the disk tier of vLLM's own SimpleCPUOffloadConnector": """
        disk_buffer_slots disk_capacity_bytes disk_path use_page_cache""",
    "OffloadingConnector": """
        backpressure block_size blocks_per_chunk cache_policy_module_path canonical_layout
        enable_telemetry eviction_policy max_tracker_size offload_prompt_only secondary_tiers
        self_describing_kv_events spec_module_path spec_name sync_load_budget_bytes
        tier_poll_interval_s""",
    "NixlConnector": """
        backends bidirectional_kv_xfer decoder_kv_blocks_ttl enforce_handshake_compat engine_ttl
        kv_lease_duration kv_recompute_threshold num_threads push_registration_timeout""",
    "Mooncake's connectors": """
        bootstrap_server_address cache_prefix custom_mem_pool device_name
        enable_cross_layers_blocks enable_group_semantics enable_lookup enable_store_tp_lcm
        load_async lookup_async lookup_rpc_port mooncake_protocol num_workers preferred_segment
        prefill_tp_sizes save_decode_cache store_tp_size""",
    "MoRIIOConnector": """
        defer_timeout handshake_port host_ip http_port notify_port post_batch_size proxy_ip
        proxy_ping_port qp_per_transfer read_mode recv_abort_timeout transfer_timeout""",
    "LMCache's connectors": """
        discard_partial_chunks skip_last_n_tokens use_layerwise use_native""",
    "HF3FSKVConnector": """
        hf3fs_client_numjobs hf3fs_file_size hf3fs_max_device_buffer_count
        hf3fs_metadata_server_url hf3fs_storage_path""",
    "UMBPStoreConnector": """
        enable_partial_hash_hits key_namespace kv_event_max_objects lookup_workers""",
    "HiSparseConnector": "host_pool_gib",
    "MultiConnector": "connectors",
    "vLLM's example and benchmark connectors": """
        allow_custom_save_path fill_mean fill_std num_writer_threads shared_storage_path
        startup_fill use_synchronization_lock""",
}
_OWNERS = {key: owner for owner, keys in _BY_CONNECTOR.items() for key in keys.split()}

_LMCACHE = "lmcache."
"""Prefix of all of LMCache's own settings."""

_INSTEAD = {
    "backends": "backend chooses how bytes move",
    "block_size": "cpu_block_size sets the size of host blocks",
    "blocks_per_chunk": "cpu_block_size sets the size of host blocks",
    "cache_policy_module_path": "eviction is segmented LRU",
    "enable_cross_layers_blocks": "kv_layout decides",
    "eviction_policy": "eviction is segmented LRU",
    "offload_prompt_only": "generated tokens are stored too",
    "secondary_tiers": "second_tier sets the one tier behind host memory",
}


def is_foreign(key: str) -> bool:
    """Whether only vLLM's other connectors read ``key``."""
    return key in _OWNERS or key.startswith(_LMCACHE)


def describe_ignored(keys: Iterable[str]) -> str:
    """The ignored ones of ``keys``, each with the reason, on one line; empty if there are none."""
    return ", ".join(f"{key} ({_why_ignored(key)})" for key in keys if is_foreign(key))


def _why_ignored(key: str) -> str:
    return _INSTEAD.get(key) or f"read by {_OWNERS.get(key, 'LMCache')}"
