//! Records as the BPF programs send them, with anything in them.

use memscope::analysis::Online;
use memscope::collect::decode::Decoder;
use memscope::model::{StepRule, StepsFrom};
use memscope::probes::catalogue::{CATALOGUE, Shape};
use memscope::probes::torch_npu::ReportLayout;
use memscope_ebpf::{Header, Mark, Pack, kind};

/// Each record has its length before it, in two bytes.
const LENGTH: usize = 2;

/// Decodes these records, of sites that are numbered as in the catalogue.
pub fn decode(mut data: &[u8]) {
    let text =
        |_, address: u64, most: usize| Some(address.to_le_bytes().repeat(most / 8 + 1)[..most].to_vec());
    let mut decoder = Decoder::new(0, Box::new(text));
    for (site, probe) in CATALOGUE.iter().enumerate() {
        decoder.set_site(site, probe, Some(ReportLayout::WithComponent));
    }
    let rule = StepRule::default();
    let mut online =
        Online::new(rule.clone(), true).with_steps_from(&rule, StepsFrom::MarksOrOps).with_decompose();
    while let [low, high, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
        let (record, next) = rest.split_at(length);
        decoder.decode(record, |event| online.feed(event, |_, _, _| {}));
        data = next;
    }
    online.finish(|_, _, _| {});
}

/// For each site what its programs send, five times.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = CATALOGUE
        .iter()
        .enumerate()
        .map(|(site, probe)| {
            let kinds = match probe.shape {
                Shape::EnterReturn { .. } => vec![kind::RETURN],
                Shape::Report { .. } => vec![kind::REPORT],
                Shape::Name { .. } => vec![kind::NAME],
                Shape::Mark { id: false, .. } => vec![kind::MARK],
                Shape::Mark { id: true, .. } => vec![kind::MARK, kind::RETURN],
                Shape::Tensor => vec![kind::TENSOR],
                Shape::Arguments { .. } => vec![kind::ARGUMENTS],
                Shape::Pack { .. } => vec![kind::PACK],
                Shape::Notify => vec![kind::MAPPED],
                Shape::Enter | Shape::Annotate => vec![kind::ENTER],
            };
            let times = 1..=5u8;
            times.flat_map(|time| kinds.iter().map(move |kind| (time, *kind))).fold(
                Vec::new(),
                |mut all, (time, kind)| {
                    all.extend(record(site as u32, kind, time));
                    all
                },
            )
        })
        .collect();
    seeds.extend([kind::STACK, kind::PIECE, kind::NATIVE, kind::EXEC].map(|kind| record(0, kind, 1)));
    seeds
}

fn record(site: u32, kind: u16, fill: u8) -> Vec<u8> {
    let length = if kind == kind::PACK { size_of::<Pack>() } else { size_of::<Mark>() } as u16;
    let mut record = length.to_le_bytes().to_vec();
    record.extend(u64::from(fill).to_le_bytes());
    record.extend([7u32, 7, site].into_iter().flat_map(u32::to_le_bytes));
    record.extend([kind, 0].into_iter().flat_map(u16::to_le_bytes));
    let words = (usize::from(length) - size_of::<Header>()) / 8;
    record.extend((0..words as u64).flat_map(|word| (word + u64::from(fill)).to_le_bytes()));
    debug_assert_eq!(record.len(), LENGTH + usize::from(length));
    record
}
