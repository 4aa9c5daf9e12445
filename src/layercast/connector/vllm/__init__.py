"""vLLM (0.26 and later): the scheduler and worker hooks of its KV connectors, translated into orders and steps."""

NAME, MODULE = "LayercastConnector", "layercast.connector.vllm.connector"


def register() -> None:
    """Make the connector known to vLLM by its name. Called in each of its processes, through an entry point."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
