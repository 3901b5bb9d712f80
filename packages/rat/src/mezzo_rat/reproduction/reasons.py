"""Why a table or claim is not attempted on one small machine."""

_MODELS_1B = (
    "needs the 1.3B models trained on 100B tokens of FineWeb-Edu (2 to 3 days on 16 H100 each)"
)
_DOWNSTREAM = f"{_MODELS_1B} and the downstream data sets"
_CONTEXT_16K = f"{_MODELS_1B} once more at 16K context"
_MODELS_200M = "needs 200M models trained on 15B tokens of PG19"
_NEEDLES = f"{_MODELS_1B} and fine-tuned on RULER's needle tasks"
_DATA = "describes data sets, not models: needs these data sets and the LLaMA2 tokenizer"
_WALL_CLOCK = "a time on the authors' cluster of H100 GPUs, which this machine cannot measure"
_GPU = "needs a GPU, and --scale gpu"

NOT_ATTEMPTED = {
    "rat.table2": _DOWNSTREAM,
    "rat.table3": _DOWNSTREAM,
    "rat.table4.lengths": _DATA,
    "rat.table4.sft": f"{_DOWNSTREAM} and fine-tuning on them",
    "rat.table5": _DATA,
    "rat.table9": f"{_MODELS_200M} at three contexts: recipes 200m_rat_l64, 200m_reversed_c64, ...",
    "rat.table10": _DOWNSTREAM,
    "rat.table11": f"{_CONTEXT_16K}; --scale gpu measures its throughput",
    "rat.table12": _NEEDLES,
    "rat.claim.ablation_params": f"{_MODELS_200M}: recipes 200m_rat_l64, 200m_rat_l64_full_qk",
    "rat.claim.ablation_rope": f"{_MODELS_200M}: recipes 200m_rat_l64, 200m_rat_l64_token_rope",
    "rat.claim.context_growth": f"{_MODELS_200M}: recipes 200m_rnn, 200m_32k_rnn, ...",
    "rat.claim.hybrid_gains": _DOWNSTREAM,
    "rat.claim.csr_gap": _DOWNSTREAM,
    "rat.claim.csr_rat_rnn": _DOWNSTREAM,
    "rat.claim.csr_winogrande": _DOWNSTREAM,
    "rat.claim.csr_hybrid_best": _DOWNSTREAM,
    "rat.claim.deltanet": "quotes another paper's numbers beside Table 2's",
    "rat.claim.longbench_top2": _DOWNSTREAM,
    "rat.claim.govreport": _DOWNSTREAM,
    "rat.claim.hotpotqa": _DOWNSTREAM,
    "rat.claim.longbench_gap": _DOWNSTREAM,
    "rat.claim.trec": _DOWNSTREAM,
    "rat.claim.code_hybrid": _DOWNSTREAM,
    "rat.claim.nqa2_attention_drop": _DOWNSTREAM,
    "rat.claim.qmsum_hybrid": _DOWNSTREAM,
    "rat.claim.nqa_hybrid": _DOWNSTREAM,
    "rat.claim.reversed_worse": f"{_MODELS_200M}: recipes 200m_rat_l64, 200m_reversed_c64, ...",
    "rat.claim.reversed_14": f"{_MODELS_200M}: recipes 200m_reversed_c16, 200m_reversed_c64",
    "rat.claim.fig6_nope": f"{_MODELS_1B}: recipes 1p3b_rat_swa_nope, 1p3b_attention_swa_nope",
    "rat.claim.nope_gap": f"{_MODELS_1B}: recipes 1p3b_rat_swa_nope, 1p3b_attention_swa_nope",
    "rat.claim.16k_gains": _CONTEXT_16K,
    "rat.claim.16k_order": _CONTEXT_16K,
    "rat.claim.16k_throughput": f"{_GPU}: untrained models of 1.3B weights at 4K and 16K",
    "rat.claim.throughput_hybrid": f"{_GPU}: models of 1.3B weights at three contexts",
    "rat.claim.niah_order": _NEEDLES,
    "rat.claim.niah_uuid": _NEEDLES,
    "rat.claim.speedup_200k": f"{_GPU}: a layer of width 2048 at 262,144 tokens",
    "rat.claim.rnn_slows": f"{_GPU}: layers at 32K to 262K tokens",
    "rat.claim.train_time_200m": _WALL_CLOCK,
    "rat.claim.train_time_1p3b": _WALL_CLOCK,
    "rat.setup.sft": "fine-tuning is not part of this version",
    "rat.setup.niah": "fine-tuning on needle tasks is not part of this version",
    "rat.setup.scope": "counts of downstream tasks, none of which is part of this version",
}
