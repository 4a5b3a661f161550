"""What each key of the stock scripts' YAML files comes to here, as data: the same under another name, nothing
at all (and why), or nothing at one value only. A key that stands nowhere in this file is refused by name.
"""

DATA = "data_config."
ARGS = "training_args."
ANSWER = "training_args.generation_config."
PEFT = "peft_config."

# Stock's key -> ours: the value is taken as it is.
SAME = {
    f"{ARGS}learning_rate": "optim.learning_rate",
    f"{ARGS}weight_decay": "optim.weight_decay",
    f"{ARGS}adam_epsilon": "optim.epsilon",
    f"{ARGS}max_grad_norm": "optim.clip",
    f"{ARGS}seed": "train.seed",
    f"{ARGS}save_total_limit": "checkpoint.keep_last",
    f"{ANSWER}max_new_tokens": "evaluate.max_new_tokens",
}

# What the stock trainer does when its file says nothing.
UNSAID = {
    "optim.name": "adamw",
    "optim.learning_rate": 5e-5,
    "optim.weight_decay": 0.0,
    "optim.betas": [0.9, 0.999],
    "optim.epsilon": 1e-8,
    "optim.schedule": "linear",
    "optim.warmup": 0.0,
    "optim.floor": 0.0,
    "optim.clip": 1.0,
    "train.seed": 42,
    "checkpoint.every": 500,
}

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adafactor": "adafactor",
}
# ZeRO stage -> parallel.shard.
STAGES = {0: "off", 1: "auto", 2: "auto", 3: "full"}

LOADING = "batches are made ahead of time in every case; the result does not depend on it"
LOGGING = "every step is in events.jsonl; the console shows what a person can follow"
GREEDY = "answers are generated greedily when evaluate.metrics asks for exact_match"
PLAN = "the plan decides it and says why; the result does not depend on it"
NETWORK = "the ranks exchange what they have to; the result does not depend on it"
MODEL = "follows from the model"

# Stock's key -> why nothing has to be said here.
NOTED = {
    "freezeV": "there is no vision tower in these models",
    f"{DATA}num_proc": "as many processes tokenize as there are cores; the result does not depend on it",
    f"{DATA}test_file": "stock runs over it once more at the end and throws the result away",
    f"{ARGS}output_dir": "the run directory is --run, or runs/NAME",
    f"{ARGS}overwrite_output_dir": "a run goes on where it stopped; --resume never starts anew",
    f"{ARGS}do_train": "the verb says it",
    f"{ARGS}do_eval": "data.dev says it",
    f"{ARGS}do_predict": "the verb says it",
    f"{ARGS}remove_unused_columns": "only what a conversation needs is read",
    f"{ARGS}dataloader_num_workers": LOADING,
    f"{ARGS}dataloader_pin_memory": LOADING,
    f"{ARGS}dataloader_prefetch_factor": LOADING,
    f"{ARGS}dataloader_persistent_workers": LOADING,
    f"{ARGS}group_by_length": "packing leaves no padding to save",
    f"{ARGS}data_seed": "train.seed decides the order too",
    f"{ARGS}log_level": LOGGING,
    f"{ARGS}log_level_replica": LOGGING,
    f"{ARGS}log_on_each_node": LOGGING,
    f"{ARGS}logging_dir": LOGGING,
    f"{ARGS}logging_strategy": LOGGING,
    f"{ARGS}logging_first_step": LOGGING,
    f"{ARGS}logging_steps": LOGGING,
    f"{ARGS}logging_nan_inf_filter": "a step that is not finite is logged as it is, and not applied",
    f"{ARGS}disable_tqdm": LOGGING,
    f"{ARGS}run_name": "the run directory is --run, or runs/NAME",
    f"{ARGS}save_safetensors": "checkpoints are always safetensors",
    f"{ARGS}save_only_model": "a checkpoint always holds all that a resume needs",
    f"{ARGS}save_on_each_node": "a checkpoint is written once",
    f"{ARGS}load_best_model_at_end": "RUN/best names the best weights, and they stay",
    f"{ARGS}metric_for_best_model": "the best checkpoint is the one with the lowest held-out loss",
    f"{ARGS}greater_is_better": "the best checkpoint is the one with the lowest held-out loss",
    f"{ARGS}per_device_eval_batch_size": PLAN,
    f"{ARGS}eval_accumulation_steps": PLAN,
    f"{ARGS}eval_delay": "the first evaluation comes before the first step",
    f"{ARGS}predict_with_generate": "stock generates answers and never computes a held-out loss; here the "
    "loss is computed, and evaluate.metrics=[loss,exact_match] generates too",
    f"{ARGS}generation_max_length": GREEDY,
    f"{ARGS}generation_num_beams": GREEDY,
    f"{ANSWER}do_sample": GREEDY,
    f"{ANSWER}num_beams": GREEDY,
    f"{ANSWER}temperature": GREEDY,
    f"{ANSWER}top_k": GREEDY,
    f"{ANSWER}top_p": GREEDY,
    f"{ANSWER}max_length": GREEDY,
    f"{ANSWER}eos_token_id": "every stop token of the model ends an answer",
    f"{ANSWER}pad_token_id": MODEL,
    f"{ARGS}bf16": "products are bfloat16 where it is fast; what is trained is kept in float32",
    f"{ARGS}bf16_full_eval": "evaluation computes as training does",
    f"{ARGS}fp16": "products are bfloat16 where it is fast, as it cannot overflow; float16 on a GPU "
    "where it is not, with a loss scale",
    f"{ARGS}fp16_full_eval": "evaluation computes as training does",
    f"{ARGS}tf32": "products are in 16 bits where the device is fast at it",
    f"{ARGS}gradient_checkpointing": PLAN,
    f"{ARGS}gradient_checkpointing_kwargs": PLAN,
    f"{ARGS}auto_find_batch_size": PLAN,
    f"{ARGS}torch_compile": PLAN,
    f"{ARGS}use_liger_kernel": PLAN,
    f"{ARGS}torch_empty_cache_steps": "memory is allocated once, so there is nothing to empty",
    f"{ARGS}average_tokens_across_devices": "the loss is always divided by the targets of the whole step",
    f"{ARGS}use_cpu": "the GPU is used where there is one; CUDA_VISIBLE_DEVICES= hides it",
    f"{ARGS}no_cuda": "the GPU is used where there is one; CUDA_VISIBLE_DEVICES= hides it",
    f"{ARGS}local_rank": NETWORK,
    f"{ARGS}ddp_backend": NETWORK,
    f"{ARGS}ddp_bucket_cap_mb": NETWORK,
    f"{ARGS}ddp_find_unused_parameters": NETWORK,
    f"{ARGS}ddp_timeout": NETWORK,
    f"{PEFT}task_type": "all of these models are causal language models",
    f"{PEFT}inference_mode": "the verb says it",
    f"{PEFT}base_model_name_or_path": "the model is the one on the command line",
    f"{PEFT}num_attention_heads": MODEL,
    f"{PEFT}num_layers": MODEL,
    f"{PEFT}num_transformer_submodules": MODEL,
    f"{PEFT}token_dim": MODEL,
    f"{PEFT}encoder_hidden_size": MODEL,
}

# Stock's key -> the values at which it changes nothing; at any other it is refused.
ONLY: dict[str, tuple[object, ...]] = {
    f"{ARGS}label_smoothing_factor": (0,),
    f"{ARGS}lr_scheduler_kwargs": ({},),
    f"{ARGS}optim_args": ("",),
    f"{ARGS}push_to_hub": (False,),
    f"{ARGS}debug": ("", []),
    f"{ARGS}full_determinism": (False,),
    f"{PEFT}bias": ("none",),
    f"{PEFT}modules_to_save": ([],),
    f"{PEFT}init_lora_weights": (True,),
    f"{PEFT}fan_in_fan_out": (False,),
    f"{PEFT}use_rslora": (False,),
    f"{PEFT}use_dora": (False,),
    f"{PEFT}rank_pattern": ({},),
    f"{PEFT}alpha_pattern": ({},),
    f"{PEFT}prefix_projection": (False,),
}
