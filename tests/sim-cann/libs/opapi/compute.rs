//! The effects of operators on the simulated memory. Shapes that do not fit leave the output alone.

use sim_cann::ffi::Address;
use sim_cann::tensor::{Element, MAX_DIMS, Tensor};

/// Tensors that one walk can go through: an output and its inputs.
const MAX_OPERANDS: usize = 4;

/// Products larger than this many multiplications are not computed: it would take seconds.
const MAX_PRODUCT: usize = 1 << 30;

fn load(element: Element, address: Address) -> f64 {
    // SAFETY: the caller of an operator gives tensors whose elements are readable, and addresses here come
    // from walking the sizes and strides of such a tensor.
    unsafe { element.load(address) }
}

fn store(element: Element, address: Address, value: f64) {
    // SAFETY: as for `load`; outputs are writable.
    unsafe { element.store(address, value) };
}

/// Walks tensors of the same dimensions in step and gives `visit` the addresses of each element.
fn walk(dims: &[usize], tensors: &[Tensor], mut visit: impl FnMut(&[Address])) {
    let mut at = [0; MAX_OPERANDS];
    let mut steps = [[0isize; MAX_DIMS]; MAX_OPERANDS];
    for ((at, steps), tensor) in at.iter_mut().zip(&mut steps).zip(tensors) {
        *at = tensor.data;
        for (step, stride) in steps.iter_mut().zip(tensor.strides()) {
            *step = stride * tensor.element.size() as isize;
        }
    }
    let at = &mut at[..tensors.len()];
    let mut index = [0; MAX_DIMS];
    for _ in 0..dims.iter().product() {
        visit(at);
        for axis in (0..dims.len()).rev() {
            index[axis] += 1;
            let wrapped = index[axis] == dims[axis];
            // Past the end of an axis, back to its begin and on with the next outer one.
            let distance = if wrapped { 1 - dims[axis] as isize } else { 1 };
            for (address, steps) in at.iter_mut().zip(&steps) {
                *address = address.wrapping_add_signed(steps[axis] * distance);
            }
            if !wrapped {
                break;
            }
            index[axis] = 0;
        }
    }
}

/// `out = f(inputs)` element by element, inputs broadcast to the shape of `out`.
pub fn map<const N: usize>(out: &Tensor, inputs: &[Tensor; N], f: impl Fn([f64; N]) -> f64) {
    let dense = |t: &Tensor| t.element == Element::F32 && t.dims() == out.dims() && t.is_contiguous();
    if dense(out) && inputs.iter().all(dense) {
        for offset in (0..out.count()).map(|index| index * size_of::<f32>()) {
            let values = inputs.map(|input| load(Element::F32, input.data + offset));
            store(Element::F32, out.data + offset, f(values));
        }
        return;
    }
    let mut operands = vec![*out];
    operands.extend(inputs.iter().filter_map(|input| input.broadcast(out.dims())));
    if operands.len() != N + 1 {
        return;
    }
    walk(out.dims(), &operands, |at| {
        let mut values = [0.0; N];
        for ((value, &address), input) in values.iter_mut().zip(&at[1..]).zip(inputs) {
            *value = load(input.element, address);
        }
        store(out.element, at[0], f(values));
    });
}

/// Folds `input` over `axes` (all when empty) from `start`, then stores `finish(value, elements folded)`.
pub fn reduce(
    out: &Tensor,
    input: &Tensor,
    axes: &[i64],
    start: f64,
    fold: impl Fn(f64, f64) -> f64,
    finish: impl Fn(f64, f64) -> f64,
) {
    let rank = input.rank;
    let folded = |axis: usize| {
        axes.is_empty() || axes.iter().any(|&a| a.rem_euclid(rank.max(1) as i64) as usize == axis)
    };
    // The results in order, seen through strides with which a folded axis goes nowhere.
    let mut results = Tensor { element: Element::F64, strides: [0; MAX_DIMS], ..*input };
    let mut kept = 1;
    for axis in (0..rank).rev().filter(|&axis| !folded(axis)) {
        results.strides[axis] = kept as isize;
        kept *= input.dims[axis];
    }
    if kept != out.count() || !out.is_contiguous() {
        return;
    }
    let mut values = vec![start; kept];
    results.data = values.as_mut_ptr() as Address;
    walk(input.dims(), &[*input, results], |at| {
        let slot = (at[1] - results.data) / size_of::<f64>();
        values[slot] = fold(values[slot], load(input.element, at[0]));
    });
    let each = (input.count() / kept.max(1)) as f64;
    for (index, value) in values.into_iter().enumerate() {
        store(out.element, out.data + index * out.element.size(), finish(value, each));
    }
}

/// A matrix as floats in row order.
fn pack(matrix: &Tensor) -> Vec<f32> {
    let mut values = Vec::with_capacity(matrix.count());
    walk(matrix.dims(), &[*matrix], |at| values.push(load(matrix.element, at[0]) as f32));
    values
}

/// `out = alpha * a b + beta * add`, of matrices. `add` is broadcast.
pub fn product(out: &Tensor, a: &Tensor, b: &Tensor, alpha: f64, add: Option<(&Tensor, f64)>) {
    let ([rows, columns], [a_rows, inner], [b_rows, b_columns]) = (out.dims(), a.dims(), b.dims()) else {
        return;
    };
    let (rows, columns, inner) = (*rows, *columns, *inner);
    if *a_rows != rows || *b_rows != inner || *b_columns != columns || rows * columns * inner > MAX_PRODUCT {
        return;
    }
    let (left, right) = (pack(a), pack(b));
    let mut sums = vec![0.0f32; rows * columns];
    for (row, sums) in sums.chunks_exact_mut(columns.max(1)).enumerate() {
        for (step, factor) in left[row * inner..][..inner].iter().enumerate() {
            for (sum, value) in sums.iter_mut().zip(&right[step * columns..][..columns]) {
                *sum += factor * value;
            }
        }
    }
    let mut result = Tensor { data: sums.as_ptr() as Address, element: Element::F32, ..*out };
    result.strides[..2].copy_from_slice(&[columns as isize, 1]);
    match add {
        Some((add, beta)) => map(out, &[result, *add], |[sum, add]| alpha * sum + beta * add),
        None => map(out, &[result], |[sum]| alpha * sum),
    }
}

/// The part of `whole` from `start`, `length` long, along `axis`.
pub fn narrow(whole: &Tensor, axis: usize, start: usize, length: usize) -> Option<Tensor> {
    let mut part = *whole;
    if axis >= whole.rank || start + length > whole.dims[axis] {
        return None;
    }
    part.dims[axis] = length;
    let offset = start as isize * whole.strides[axis] * whole.element.size() as isize;
    part.data = part.data.wrapping_add_signed(offset);
    Some(part)
}

/// `whole` with one axis fixed at `index`, and without it.
pub fn select(whole: &Tensor, axis: usize, index: usize) -> Option<Tensor> {
    let mut part = narrow(whole, axis, index, 1)?;
    part.dims.copy_within(axis + 1.., axis);
    part.strides.copy_within(axis + 1.., axis);
    part.rank -= 1;
    Some(part)
}

/// Softmax (or its logarithm) along `axis`.
pub fn softmax(out: &Tensor, input: &Tensor, axis: i64, logarithm: bool) {
    let axis = axis.rem_euclid(input.rank.max(1) as i64) as usize;
    if out.dims() != input.dims() || axis >= input.rank {
        return;
    }
    let (Some(firsts), Some(firsts_out)) = (select(input, axis, 0), select(out, axis, 0)) else { return };
    let length = input.dims[axis];
    let step = input.strides[axis] * input.element.size() as isize;
    let step_out = out.strides[axis] * out.element.size() as isize;
    walk(firsts.dims(), &[firsts_out, firsts], |at| {
        let line: Vec<f64> = (0..length as isize)
            .map(|index| load(input.element, at[1].wrapping_add_signed(index * step)))
            .collect();
        let largest = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = line.iter().map(|value| (value - largest).exp()).sum();
        for (index, value) in line.iter().enumerate() {
            let shifted = value - largest;
            let result = if logarithm { shifted - sum.ln() } else { shifted.exp() / sum };
            store(out.element, at[0].wrapping_add_signed(index as isize * step_out), result);
        }
    });
}

/// Rows of `table` by number: `out[i] = table[indices[i]]`. Numbers out of range leave their row alone.
pub fn gather(out: &Tensor, table: &Tensor, indices: &Tensor) {
    let Some(width) = table.rank.checked_sub(1) else { return };
    if indices.rank + width != out.rank {
        return;
    }
    let mut numbers = Vec::with_capacity(indices.count());
    walk(indices.dims(), &[*indices], |at| numbers.push(load(indices.element, at[0])));
    let rows = Tensor { rank: indices.rank, ..*out };
    let mut numbers = numbers.into_iter();
    walk(rows.dims(), &[rows], |at| {
        let Some(number) = numbers.next() else { return };
        let Some(source) = select(table, 0, number as usize) else { return };
        let mut target = Tensor { data: at[0], rank: width, ..*out };
        target.dims.copy_within(indices.rank.., 0);
        target.strides.copy_within(indices.rank.., 0);
        map(&target, &[source], |[value]| value);
    });
}

/// Numbers that look random and follow from `seed` alone: uniform in [0, 1).
pub fn random(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / u64::MAX as f64
    }
}

/// Stores the results of `next` in every element, in order.
pub fn fill(out: &Tensor, mut next: impl FnMut(usize) -> f64) {
    let mut index = 0;
    walk(out.dims(), &[*out], |at| {
        store(out.element, at[0], next(index));
        index += 1;
    });
}
