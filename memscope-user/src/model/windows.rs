//! Functions of frameworks that say whose memory it is that is allocated within them.
//!
//! They and their labels are those that msMemScope (26.0) puts its hooks on. Here a stack that passes through one of them
//! says the same, and nothing is put anywhere.

use super::{Frame, Name};

/// Labels of one stack at most: functions that call each other in turns have no end.
const DEPTH: usize = 8;

/// (part of the module's path, function, label). A function with a class is met without it, too: up to 3.10 the
/// interpreter does not tell.
const WINDOWS: &[(&str, &str, &str)] = &[
    ("vllm_ascend/worker/", "load_model", "vllm@weights"),
    ("vllm_ascend/worker/", "initialize_kv_cache", "vllm@kv_cache"),
    ("vllm_ascend/worker/", "initialize_kv_cache_tensors", "vllm@kv_cache"),
    ("vllm_ascend/worker/", "profile_run", "vllm@profile"),
    ("vllm_ascend/worker/", "execute_model", "vllm@serve"),
    ("vllm_ascend/worker/", "compile_or_warm_up_model", "vllm@warmup"),
    ("vllm_ascend/worker/", "capture_model", "graph_pool"),
    (
        "distributed/fsdp/fully_sharded_data_parallel.py",
        "FullyShardedDataParallel.forward",
        "fsdp1@activation",
    ),
    ("distributed/fsdp/_runtime_utils.py", "_pre_backward_hook", "fsdp1@backward"),
    ("distributed/fsdp/_runtime_utils.py", "_post_backward_hook", "fsdp1@backward"),
    ("distributed/fsdp/_runtime_utils.py", "_reduce_grad", "fsdp1@gradient"),
    (
        "distributed/fsdp/_flat_param.py",
        "FlatParamHandle._init_flat_param_and_metadata",
        "fsdp1@sharded_weight",
    ),
    (
        "distributed/fsdp/_flat_param.py",
        "FlatParamHandle._alloc_padded_unsharded_flat_param",
        "fsdp1@all_gather",
    ),
    ("/_fsdp_state.py", "FSDPState._pre_forward", "fsdp2@activation"),
    ("/_fsdp_state.py", "FSDPState._post_forward", "fsdp2@activation"),
    ("/_fsdp_state.py", "FSDPState._pre_backward", "fsdp2@backward"),
    ("/_fsdp_param_group.py", "FSDPParamGroup.post_backward", "fsdp2@backward"),
    ("/_fsdp_param.py", "FSDPParam._init_sharded_param", "fsdp2@sharded_weight"),
    ("/_fsdp_param.py", "FSDPParam.init_all_gather_outputs", "fsdp2@all_gather_output"),
    ("/_fsdp_collectives.py", "foreach_all_gather", "fsdp2@all_gather_output"),
    ("/_fsdp_collectives.py", "DefaultAllGather.allocate", "fsdp2@all_gather_output"),
    ("/_fsdp_collectives.py", "foreach_reduce", "fsdp2@gradient"),
    ("/_fsdp_collectives.py", "DefaultReduceScatter.allocate", "fsdp2@gradient"),
];

/// The labels of a stack (innermost first), from the outermost window on, joined with `@`.
pub(super) fn label(frames: &[Frame]) -> Option<Name> {
    let mut labels: Vec<&str> = Vec::new();
    // A worker's method calls the one of the same name of what it works with: one window.
    for found in frames.iter().rev().filter_map(window) {
        if labels.last() != Some(&found) && labels.len() < DEPTH {
            labels.push(found);
        }
    }
    (!labels.is_empty()).then(|| labels.join("@").into())
}

fn window(frame: &Frame) -> Option<&'static str> {
    let name = frame.function.rsplit('.').next().unwrap_or_default();
    let is_it = |(file, function, _): &&(&str, &str, &str)| {
        frame.file.contains(file)
            && match function.split_once('.') {
                Some((_, method)) => *frame.function == **function || *frame.function == *method,
                // Of whatever class: frameworks derive from each other's.
                None => name == *function,
            }
    };
    WINDOWS.iter().find(is_it).map(|(.., label)| *label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(frames: &[(&str, &str)]) -> Option<String> {
        let frame = |(file, function): &(&str, &str)| Frame {
            function: (*function).into(),
            file: (*file).into(),
            line: Some(1),
        };
        label(&frames.iter().map(frame).collect::<Vec<_>>()).map(|label| label.to_string())
    }

    #[test]
    fn functions_of_frameworks_label_what_is_allocated_within() {
        let runner = "/opt/venv/lib/python3.11/site-packages/vllm_ascend/worker/model_runner_v1.py";
        let worker = "/opt/venv/lib/python3.11/site-packages/vllm_ascend/worker/worker_v1.py";
        let torch = "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py";
        let within = [
            (torch, "Module._call_impl"),
            (runner, "NPUModelRunner.execute_model"),
            (worker, "NPUWorker.execute_model"),
            ("serve.py", "main"),
        ];
        assert_eq!(stack(&within).as_deref(), Some("vllm@serve"));
        // As interpreters up to 3.10 tell it, and in one of the other.
        let within = [(runner, "capture_model"), (worker, "compile_or_warm_up_model"), ("serve.py", "main")];
        assert_eq!(stack(&within).as_deref(), Some("vllm@warmup@graph_pool"));
        let fsdp = "/src/torch/distributed/fsdp/fully_sharded_data_parallel.py";
        assert_eq!(stack(&[(fsdp, "FullyShardedDataParallel.forward")]).as_deref(), Some("fsdp1@activation"));
        assert_eq!(stack(&[(fsdp, "forward")]).as_deref(), Some("fsdp1@activation"));
        assert_eq!(stack(&[(fsdp, "Other.forward"), ("/home/me/train.py", "load_model")]), None);
        assert_eq!(stack(&[]), None);
    }
}
