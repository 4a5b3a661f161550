"""What keys of LLaMA-Factory's YAML files mean that are no arguments of the trainer, as data: nothing
at all (and why), or nothing at some values only. What `config/llamafactory.py` maps is in neither.
"""

from collections.abc import Mapping

# Why a key needs nothing here -> the keys for which that holds.
SHARED_REASONS = {
    "the plan decides it and says why; the result does not depend on it": (
        "disable_gradient_checkpointing use_reentrant_gc enable_liger_kernel use_unsloth use_unsloth_gc "
        "flash_attn use_v1_kernels low_cpu_mem_usage offload_folder use_kv_cache"
    ),
    "prepared data are cached by their content, and read as a stream": (
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size streaming buffer_size "
        "tokenized_path data_shared_file_system"
    ),
    "no code of a model directory is run": "trust_remote_code",
    "the tokenizer's own files are read": "use_fast_tokenizer",
    "documents side by side in a row never see each other": "neat_packing",
    "a run draws its picture by `watch RUN`, and `watch RUN --html FILE` writes it": "plot_loss",
    "evaluate.metrics=[loss,exact_match] counts right answers": "compute_accuracy",
    "tokens a second are in every step's event": (
        "include_num_input_tokens_seen include_tokens_per_second include_effective_tokens_per_second"
    ),
    "for answering, exporting or serving, which have verbs of their own": (
        "infer_backend infer_dtype export_dir export_size export_device export_legacy_format "
        "temperature top_p top_k max_new_tokens do_sample num_beams"
    ),
    "there is no vision tower in these models": (
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen "
        "freeze_vision_tower freeze_multi_modal_projector media_dir"
    ),
    "hubs keep what they sent in their own cache": "cache_dir",
    "the GLM models of today's releases have no thinking that is trained apart": (
        "enable_thinking preserve_thinking"
    ),
    "what is trained is kept in float32, products are bfloat16 where it is fast": "pure_bf16",
    "norms are computed in float32 in any case": "upcast_layernorm upcast_lmhead_output",
    "scales of 4-bit blocks are in 8 bits in any case": "double_quantization",
    "adapters are never mixed into the base while it trains": "create_new_adapter",
    "ranks are started by --nproc or torchrun": (
        "ray_num_workers ray_run_name ray_storage_path ray_init_kwargs resources_per_worker "
        "placement_strategy master_addr master_port"
    ),
    "it says no more than other keys do": (
        "print_param_status swanlab_project swanlab_workspace swanlab_run_name swanlab_logdir"
    ),
}
NOTED = {key: reason for reason, keys in SHARED_REASONS.items() for key in keys.split()}

# LLaMA-Factory's key -> the values at which it changes nothing; at any other it is refused.
OFF = (
    "train_on_prompt use_rslora use_dora pissa_init pissa_convert use_galore use_apollo use_badam "
    "use_adam_mini use_muon use_llama_pro use_mca use_megatron_bridge use_hyper_parallel "
    "use_dft_loss use_asft_loss use_eaft_loss shift_attn resize_vocab split_special_tokens "
    "train_from_scratch fp8 block_diag_attn use_kt eval_on_each_dataset disable_shuffling "
    "freeze_language_model use_ray enable_torch_profiler"
)
ONLY: Mapping[str, tuple[object, ...]] = dict.fromkeys(OFF.split(), (False,)) | {
    "mix_strategy": ("concat",),
    "model_revision": ("main",),
    "quantization_method": ("bnb", "bitsandbytes"),
    "quantization_type": ("nf4",),
    "ignore_pad_token_for_loss": (True,),
    "freeze_trainable_modules": ("all",),
    "tool_format": ("glm4",),
    "default_system": ("",),
}

STAGES = ("pt", "sft")
# Their name -> ours; what one template of theirs serves, our detection tells apart.
TEMPLATES = {"glm4": "auto", "chatglm3": "chatglm3", "chatglm2": "chatglm2"}
# Keys that are an argument of a verb here -> what to type.
ARGUMENTS = {
    "adapter_name_or_path": "remove it, and say `train ... --init-from DIR`",
    "resume_from_checkpoint": "remove it, and say `train --resume RUN`",
    "num_samples": "remove it; max_samples, or `first` of a source of data.train, takes the first rows",
    "rope_scaling": "remove it: positions are as the model's config says",
}
