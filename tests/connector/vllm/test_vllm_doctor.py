def test_what_doctor_foretells_of_a_model_is_what_vllm_registers(drive):
    facts = drive("doctor")
    assert list(facts) == ["llama", "gpt_oss", "granite4h", "deepseek_v3"]
    for name, found in facts.items():
        for what, (foretold, registered) in found.items():
            assert foretold == registered, (name, what)
    assert facts["granite4h"]["state_bytes"][0] > 0
