"""What each key of the stock scripts' YAML files means here, as data: the same under another name, nothing at
all (and why), or nothing at one value only. A key that is not in this file is refused by name.
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

# What the stock trainer does by default.
DEFAULTS = {
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

MODEL = "follows from the model"

# Why a key needs nothing here -> the keys of training_args for which that holds.
SHARED_REASONS = {
    "batches are made ahead of time in every case; the result does not depend on it": (
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
        "dataloader_persistent_workers"
    ),
    "every step is in events.jsonl; the console shows what a person can follow": (
        "log_level log_level_replica log_on_each_node logging_dir logging_strategy logging_first_step "
        "logging_steps disable_tqdm"
    ),
    "the plan decides it and says why; the result does not depend on it": (
        "per_device_eval_batch_size eval_accumulation_steps gradient_checkpointing "
        "gradient_checkpointing_kwargs auto_find_batch_size torch_compile use_liger_kernel"
    ),
    "the ranks exchange what they have to; the result does not depend on it": (
        "local_rank ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout"
    ),
    "the run directory is --run, or runs/NAME": "output_dir run_name",
    "the verb says it": "do_train do_predict",
    "evaluation computes as training does": "bf16_full_eval fp16_full_eval",
    "the GPU is used where there is one; CUDA_VISIBLE_DEVICES= hides it": "use_cpu no_cuda",
    "the best checkpoint is the one with the lowest held-out loss": "metric_for_best_model greater_is_better",
    "answers are generated greedily when evaluate.metrics asks for exact_match": (
        "generation_max_length generation_num_beams generation_config.do_sample generation_config.num_beams "
        "generation_config.temperature generation_config.top_k generation_config.top_p "
        "generation_config.max_length"
    ),
}

# Stock's key -> why it needs nothing here.
NOTED = {f"{ARGS}{key}": reason for reason, keys in SHARED_REASONS.items() for key in keys.split()} | {
    "freezeV": "there is no vision tower in these models",
    f"{DATA}num_proc": "as many processes tokenize as there are cores; the result does not depend on it",
    f"{DATA}test_file": "stock runs over it once more at the end and throws the result away",
    f"{ARGS}overwrite_output_dir": "a run goes on where it stopped; --resume never starts anew",
    f"{ARGS}do_eval": "data.dev says it",
    f"{ARGS}remove_unused_columns": "only what a conversation needs is read",
    f"{ARGS}group_by_length": "packing leaves no padding to save",
    f"{ARGS}data_seed": "train.seed decides the order too",
    f"{ARGS}logging_nan_inf_filter": "a step that is not finite is logged as it is, and not applied",
    f"{ARGS}save_safetensors": "checkpoints are always safetensors",
    f"{ARGS}save_only_model": "a checkpoint always holds all that a resume needs",
    f"{ARGS}save_on_each_node": "a checkpoint is written once",
    f"{ARGS}load_best_model_at_end": "RUN/best names the best weights, and they stay",
    f"{ARGS}eval_delay": "the first evaluation comes before the first step",
    f"{ARGS}predict_with_generate": "stock generates answers and never computes a held-out loss; here the "
    "loss is computed, and evaluate.metrics=[loss,exact_match] generates too",
    f"{ANSWER}eos_token_id": "every stop token of the model ends an answer",
    f"{ANSWER}pad_token_id": MODEL,
    f"{ARGS}bf16": "products are bfloat16 where it is fast; what is trained is kept in float32",
    f"{ARGS}fp16": "products are bfloat16 where it is fast, as it cannot overflow; float16 on a GPU "
    "where it is not, with a loss scale",
    f"{ARGS}tf32": "products are in 16 bits where the device is fast at it",
    f"{ARGS}torch_empty_cache_steps": "memory is allocated once, so there is nothing to empty",
    f"{ARGS}average_tokens_across_devices": "the loss is always divided by the targets of the whole step",
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
