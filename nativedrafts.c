// The drafts of a lone text: nativedrafts.py says why. It is compiled behind native.c, whose functions it calls.
//
//     T tokens before the first draft · k drafts · C hidden size · V vocabulary

// softmax(x / t): [V]; of t = 0 the first of the largest.
static void soften(const float *x, float *p, long V, float t) {
    float most = x[0], all = 0;
    long first = 0;
    for (long i = 1; i < V; i++) if (x[i] > most) most = x[first = i];
    if (t == 0) {
        for (long i = 0; i < V; i++) p[i] = (i == first) + 0 * x[i];      // what is no number stays none
        return;
    }
    #pragma omp simd reduction(+:all)
    for (long i = 0; i < V; i++) {
        float z = (x[i] - most) / t, e = exponential(z);
        p[i] = z < -87 ? 0 : e;
        all += p[i];
    }
    for (long i = 0; i < V; i++) p[i] /= all;
}

// k tokens of a text, each picked before the next pass, with a coin of its own: drafted[k], from q: [k, V]. x: [T, C] of the tokens before them; cos,
// sin, step: for T + k − 1 tokens. room: as `layers` needs for T, T · C and as many as the head gives.
void drafts(const Layer *l, long L, const float *norm, const Weight *embed, const Weight *head, float *x, float *room, const float *cos, const float *sin,
            const Step *step, long layer, long T, long H, long G, long D, float eps, float t, const int64_t *place, const int64_t *role,
            int64_t *drafted, float *q, long k, long V) {
    long C = l->qkv->K;
    float *out = room, *logits = out + T * C;
    Step now = *step;
    for (long j = 0; j < k; j++) {
        layers(l, L, norm, x, out, logits + head->N, cos, sin, &now, layer, T, H, G, D, eps);
        product(out + (T - 1) * C, head, logits, 1);
        soften(logits, q + j * V, V, t);
        pick_f32(q + j * V, place + j, role + j, 1, drafted + j, 1, V);
        rows(embed, drafted + j, x, 1);
        cos += T * D, sin += T * D, now.positions += T, T = 1;            // the owner is the same
    }
}
