"""The seven stages of a save: lock, stage, plan, serialize, upload, commit, retention.

A stage is an async function that receives from one stream, sends to the next, and closes its own
end of it. Stages know each other only by what goes through the streams;
:func:`ckpipe.save_run.run_save` joins them.
"""
