"""vLLM (0.26 to 0.33): the scheduler and worker hooks of its KV connectors, translated into orders and steps."""

import logging

NAME, MODULE = "LayercastConnector", "layercast.connector.vllm.connector"


def register() -> None:
    """Make the connector known to vLLM by its name. Called in each of its processes, through an entry point."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    join_log()


def join_log() -> None:
    """Let vLLM's log carry ours, receipts among it, unless somebody has set our logger up."""
    ours, theirs = logging.getLogger("layercast"), logging.getLogger("vllm")
    if ours.level == logging.NOTSET and not ours.handlers:
        ours.setLevel(theirs.level)
        ours.handlers = theirs.handlers
